"""Data-dependent control flow: Python code that asks a tensor for its value.

In: a module that branches on tensors. Out: the branch that the call takes, where it follows from inputs and constants
(`data_dependent.py`, begin there, with `concrete_values.py`), or both branches and a `where` (`random_branches.py`,
`branch_selection.py`).
"""
