"""What a plan needs of a device's memory: allocations and frees of a slot's Program, one after the other.

In: a `Deployment` and its graph. Out: the same with the most bytes in use (`replayed_memory.py`, begin there).
"""
