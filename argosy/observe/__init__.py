"""Seeing what happens: events on disk, progress on the screen. Imports nothing else of Argosy.

Read `events.py` (what is written), `meter.py` (steps and speed), `progress.py` (what is shown), `channel.py` (how a
worker's events reach the launcher's screen).
"""
