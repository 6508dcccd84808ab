"""Finds the graph that a call of a model runs.

In: a call. Out: the number of a graph that is bound to the deployment (`graph_table.py`). For a call that has none,
`graph_binding.py` (begin there) traces one (`call_tracing.py`) and binds it, after deploying the model for the first;
`argument_learning.py` learns from it which plain arguments the code reads, `retraces.py` tells what costs a trace again
and again. `equal_batches.py` and `loss_check.py` look at what ranks pass, and at the losses.
"""
