"""The user's optimizer, reduced to the parameters that a rank holds.

In: an optimizer of all parameters. Out: the same object with this rank's part (`local_optimizer.py`, begin there),
whose state can be gathered and loaded in the form of a single process (`optimizer_state.py`, `global_optimizer.py`).
"""
