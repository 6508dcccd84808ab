"""From a model and one call of it to a graph of ATen operators that can be cut into stages.

In: an `nn.Module` and the arguments of a call. Out: a `ModelGraph` (`model.py`): the traced graph, which values carry
the batch, which nodes may be placed on a stage, and the torch-free `TaskGraph` that the planner reads. Start with
`model.build`; `comparison.py` proves that a graph computes what its model computes, `dump.py` and `drawing.py` write
it for people.

Folders, from the lowest layer: call, fingerprint, modules, fx, then branches, partition and rows, then tracing.
"""
