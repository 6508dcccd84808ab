"""The graph of a call, the same on every rank.

In: a model and a call. Out: a `ModelGraph`, from the cache or traced now (`trace_provider.py`, begin there), compared
once with the model (`trace_checking.py`); `shape_families.py` lets calls of other sizes share a trace.
"""
