"""Gradients of parameters, once a step has made them.

In: gradients of one rank's stage. Out: the mean over all ranks (`reducer.py`, begin there) in the user's parameters,
hooks included; norms and overflow checks over the whole model although every rank holds a part.
"""
