"""Provides the plan for a graph: from the cache, from a file, or newly made.

In: a `ModelGraph` and the ranks. Out: a `Deployment` that fits the memory of all ranks (`plan_provider.py`, begin
there), planned with the costs of `rannd/runtime/costs`.
"""
