"""Gradient compression: averaging gradients over workers in fewer bytes than they have.

Read `codec.py` (the interface), then any codec: each is one file. `catalogue.py` makes them from a strategy.
"""
