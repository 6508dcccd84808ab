"""What a call of the model looks like.

In: the arguments of a call. Out: a `Signature` (`signature.py`, the place to begin): which arguments are tensors,
which of them carry the batch, and how arguments and results are flattened. The other files say what is wrong with a
call, and in what the calls of two ranks differ.
"""
