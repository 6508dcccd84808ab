"""A plan at work on the ranks of a job.

In: the user's model and its calls. Out: losses and gradients as one process would compute them. Begin with
`module.py` (`RaNNCModule`, the user's wrapper) and `session.py` (what a call does); `call_tracing.py` is the long way
of a call that has no graph yet, `loss_check.py` stops at a NaN. `registry.py` knows the wrapped models, `profiling.py`
is `pyrannc.profile`.

Folders, from the lowest layer: failure, comm, storage, parameters, optim, gradients, execution, planning, traces,
deployment, checkpoint.
"""
