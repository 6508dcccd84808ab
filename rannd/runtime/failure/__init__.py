"""Ranks that fail, hang or compute NaN: every other rank hears of it and ends.

In: errors, closed connections, steps that do not end. Out: one report of the first failure, on every rank. Begin with
`detector.py` (in every rank) and `coordinator.py` (on rank 0); `side_channel.py` has their messages.
"""
