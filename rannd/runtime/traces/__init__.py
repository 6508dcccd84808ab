"""Provides the graph of a call, the same on every rank.

In: a model and a call. Out: a `ModelGraph`, from the cache or newly traced (`trace_provider.py`, begin there), compared
once with the model (`trace_checking.py`); `shape_families.py` lets calls with other sizes share a trace,
`branch_ways.py` limits the graphs that branches of the model's code lead to.
"""
