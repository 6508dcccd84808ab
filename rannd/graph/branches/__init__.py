"""Data-dependent control flow: Python code that reads the value of a tensor.

In: a module that branches on tensors. Out: for a branch on inputs and constants, the side that the call takes
(`data_dependent.py`, start there, with `concrete_values.py`); for one on a random number, both sides and a `where`
(`random_branches.py`, `branch_selection.py`).
"""
