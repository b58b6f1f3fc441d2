"""What makes large batches and 16-bit numbers train well: LARS, LAMB, scaling rules, averages, loss scaling.

One concept per file.
"""
