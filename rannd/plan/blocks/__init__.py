"""From thousands of ops to a few blocks that stages are made of.

In: a `TaskGraph`. Out: blocks in order (`blocks.py`), made of atoms (`atoms.py`, begin there) and of grains, which
are measured (`grains.py`). `cut_places.py` limits cuts to the user's CutPoints.
"""
