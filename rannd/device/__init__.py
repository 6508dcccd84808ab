"""Devices of ranks: the only code that knows of CUDA, on top of torch.accelerator.

In: a `torch.device`, or the rank's place on its node. Out: which device it is (`identity`), its memory (`memory`) and
what is in use of it beside tensors (`memory_beside`), waits and side streams (`streams`), copies to it (`host_copies`),
reads of it (`reads`), random generators (`generators`) and autocast regions (`autocast`); times of what it does
(`timing`) and of a rank's actions while it trains (`action_clock`), its caches (`caches`) and the settings that choose
its kernels (`kernel_flags`). On the CPU, what has to do with streams does nothing. Read `identity` first.
"""
