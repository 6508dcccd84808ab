"""Runs a wrapped model on the ranks of a job.

In: the user's model and its calls. Out: the losses and gradients that a single process would compute. Begin with
`module.py` (`RaNNCModule`, the user's wrapper) and `session.py` (the steps of a call); folder `calls` finds the graph
that a call runs, or traces one. `profiling.py` implements `pyrannc.profile`, `averaged_model.py`
`pyrannc.AveragedModel`.

Folders, from the lowest layer: failure, comm, storage, parameters, optim, gradients, compiling, execution, planning,
traces, deployment, calls, wrapping, checkpoint.
"""
