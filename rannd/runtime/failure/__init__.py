"""Failure detection: if a rank fails, hangs or computes NaN, all ranks report it and end.

In: exceptions, closed connections, steps without progress. Out: a report of the first failure, on every rank. Start
with `detector.py` (on every rank) and `coordinator.py` (on rank 0); `side_channel.py` defines their messages.
"""
