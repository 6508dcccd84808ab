"""Which rank holds which parameters and buffers, and where their values come from.

In: a model, on the CPU, a device or the meta device. Out: the tensors of this rank's stage (`ownership.py`, begin
there) and `state_dict` of the whole model (`state_dict.py`). `deferred_init.py` (with recorder and tape) builds a
model that no rank could hold whole.
"""
