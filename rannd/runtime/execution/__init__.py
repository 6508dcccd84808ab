"""Execution of one training step.

In: a mini-batch. Out: the outputs of the call, attached to the script's autograd graph. Start with `executor.py`,
which runs a Program on the graphs that the ranks' mini-batches have (`played_graph.py`): `inputs.py` slices the
mini-batch into microbatches, `stage.py` computes one, `p2p.py` sends values between stages, `outputs.py` assembles
results, `autograd_bridge.py` connects them to `loss.backward()`.
"""
