"""What a job knows of its costs: measured times of parts and links, and what steps of earlier jobs say of them.

In: a `ModelGraph` and the ranks. Out: the `CostTable` of its blocks (`profiler.py`, begin there).
"""
