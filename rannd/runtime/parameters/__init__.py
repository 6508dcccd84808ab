"""Placement of parameters and buffers on ranks, their initialization, and `state_dict`.

In: a model, on the CPU, a device or the meta device. Out: the tensors of this rank's stage (`ownership.py`, start
there) and the `state_dict` of the whole model (`state_dict.py`). `deferred_init.py` (with `op_recorder.py` and
`op_tape.py`) builds models that are too large for the memory of one rank.
"""
