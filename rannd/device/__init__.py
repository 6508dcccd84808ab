"""Devices of ranks: the only code that knows of CUDA, on top of torch.accelerator.

In: a `torch.device`, or the rank's place on its node. Out: which device it is (`identity`), its memory (`memory`),
waits and side streams (`streams`), copies to it (`host_copies`), reads of it (`reads`), random generators
(`generators`) and autocast regions (`autocast`). On the CPU, what has to do with streams does nothing. Read `identity`
first.
"""
