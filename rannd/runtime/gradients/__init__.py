"""Reduces gradients of parameters after backward, and computes their norm over the whole model.

In: gradients of one rank's stage. Out: their mean over all ranks (`reducer.py`, begin there) in the user's parameters,
after the user's hooks; gradient norms and overflow checks over the whole model, although each rank holds only a part.
"""
