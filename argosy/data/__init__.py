"""Data: every sample exactly once per epoch, whatever the number of workers.

Read `order.py` (which sample stands where), `batches.py` (what makes a step, and each worker's share of it),
`balance.py` (shares that follow speed), then `loader.py` (the script's DataLoader, divided).
"""
