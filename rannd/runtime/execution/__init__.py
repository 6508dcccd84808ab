"""One training step of a bound graph.

In: a mini-batch. Out: the outputs of the call, as part of the script's autograd graph. Begin with `executor.py`,
which runs a Program: `inputs.py` slices the mini-batch into microbatches, `stage.py` computes one, `p2p.py` moves
values between stages, `outputs.py` puts results together, `autograd_bridge.py` joins them to `loss.backward()`.
"""
