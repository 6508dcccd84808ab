"""Signatures of model calls: flattened arguments, and which of them carry the batch.

In: the arguments of a call. Out: a `Signature` (`signature.py`, start there): which arguments are tensors, which of
them carry the batch, and how arguments and results are flattened. The other files explain invalid calls and compare
the calls of different ranks.
"""
