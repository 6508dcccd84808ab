"""Process-wide switches that scripts set by functions of `pyrannc`."""

from __future__ import annotations

delayed = False
"""Whether gradients stay unreduced until `allreduce_grads`, or the first backward after this is switched off."""

keeps_graph = False
"""Whether every backward retains the graph (activations) for another backward through the same call."""

building = False
"""Whether a model is being built under DistributeModelParams, where new tensors have no memory."""

sync_params = True
"""Whether rank 0's parameters are broadcast when a model is deployed."""


def delay_grad_allreduce(delay: bool) -> None:
    """Delay the reduction of gradients (accumulation over several backwards), or reduce them in the next backward."""
    global delayed
    delayed = delay


def sync_params_on_init(sync: bool) -> None:
    """Set whether rank 0's parameters are broadcast at deployment; if not, they must already be equal on all ranks."""
    global sync_params
    sync_params = sync


def keep_graph(keep: bool) -> None:
    """Set whether every backward retains the graph for another backward, as ``retain_graph=True`` does."""
    global keeps_graph
    keeps_graph = keep
