"""A graph bound to the slots of a deployment: the stages that this rank runs, and what stages send to each other.

In: a graph and a deployment. Out: a `BoundGraph`. Start with `bound_graph.py`; `planned_cut.py` says what a deployment
puts where, `traffic.py` makes the Programs, `microbatches.py` slices mini-batches, `slot_tensors.py` has a rank's
tensors.
"""
