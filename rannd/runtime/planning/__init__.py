"""A plan for a graph: from the cache, from a file, or made now.

In: a `ModelGraph` and the ranks. Out: a `Deployment` that fits the memory of all ranks (`plan_provider.py`, begin
there), made of measured costs (`profiler.py`).
"""
