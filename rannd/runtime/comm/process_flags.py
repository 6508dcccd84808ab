"""Switches of the whole process, as RaNNC's scripts set them."""

from __future__ import annotations

delayed = False
"""Gradients wait for `allreduce_grads`, or for the first backward after it is off again."""

keeps_graph = False
"""What a backward needs is kept for another one through the same call."""

building = False
"""A model is being built under DistributeModelParams: tensors that are made have no memory."""

sync_params = True
"""Ranks take rank 0's parameters when a model is deployed."""


def delay_grad_allreduce(delay: bool) -> None:
    """Hold gradients back (accumulation over several backwards), or reduce them at the next backward."""
    global delayed
    delayed = delay


def sync_params_on_init(sync: bool) -> None:
    """Whether ranks take rank 0's parameters at deployment; off, they must be equal already."""
    global sync_params
    sync_params = sync


def keep_graph(keep: bool) -> None:
    """Let every backward keep what it needs for another one through the same call, as ``retain_graph=True`` does."""
    global keeps_graph
    keeps_graph = keep
