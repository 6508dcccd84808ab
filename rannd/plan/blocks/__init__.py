"""Partitioning of thousands of ops into the few blocks that stages consist of.

In: a `TaskGraph`. Out: blocks in order (`blocks.py`), made of atoms (`atoms.py`, begin there) and of grains, the units
that are measured (`grains.py`). `cut_places.py` limits cuts to the user's CutPoints.
"""
