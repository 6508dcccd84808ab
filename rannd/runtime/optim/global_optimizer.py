"""Give an optimizer's instance a ``state_dict`` and ``load_state_dict`` that take `from_global`.

With `from_global` they are collectives about all ranks' parameters; with ``from_global=False`` the class's own, about
this rank's. Unless it is said, they are collectives where ranks have different parts: scripts for one process save and
load the whole state. Saving only a part of it by mistake is an error, also by pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rannd.errors import UsageError, advice_for_caller
from rannd.runtime.comm.world import World
from rannd.runtime.optim.local_optimizer import WholeOptimizer
from rannd.runtime.optim.optimizer_state import gather_optimizer, load_optimizer
from rannd.runtime.parameters.state_elsewhere import optimizer_elsewhere

_ANY_ADVICE = (
    "Call optimizer.state_dict(from_global=True) on all ranks (rank 0 gets the whole state), or use "
    "pyrannc.save_checkpoint; optimizer.state_dict(from_global=False) is this rank's part alone"
)
_ADVICE = {
    ("accelerate.optimizer", "__init__"): (
        "Call accelerator.prepare before the model's first call, or after model.undeploy() on all ranks"
    ),
    ("accelerate.optimizer", "state_dict"): (
        "Call optimizer.optimizer.state_dict(from_global=True) on all ranks (rank 0 gets the whole state), or use "
        "pyrannc.save_checkpoint, which takes the prepared optimizer"
    ),
    ("accelerate.", "save_state"): (
        "In place of accelerator.save_state and load_state call pyrannc.save_checkpoint(folder, model, optimizer) and "
        "load_checkpoint on all ranks; they take the prepared optimizer, and scheduler=, step= and extra="
    ),
}
"""What to do instead of calls of other libraries (see `advice_for_caller`)."""


def whole_optimizer(optimizer: torch.optim.Optimizer, world: World) -> WholeOptimizer:
    """The WholeOptimizer of an optimizer, attached now if it was not."""
    whole = WholeOptimizer.of(optimizer, world)
    if whole.attached:
        return whole
    whole.attach()

    def ensure_whole() -> None:
        whole.settle()
        if missing := whole.elsewhere() + whole.divided():
            raise UsageError(
                f"other ranks hold the state of {missing} of the optimizer's parameters, or a part of it. "
                f"{advice_for_caller(_ADVICE, _ANY_ADVICE)}"
            )

    def reduce(protocol: Any) -> Any:
        """The class's own; pickle and copy ask for it. UsageError where this rank has only a part of the parameters."""
        ensure_whole()
        return type(optimizer).__reduce_ex__(optimizer, protocol)

    def state_dict(from_global: bool | None = None, to_cpu: bool = True, root: int = 0) -> dict[str, Any]:
        """The class's own, or with `from_global` the state of a single process's optimizer, on rank `root`. Collective.

        Unless `from_global` is given, it is True where ranks have different parts of the state. `to_cpu` has no effect:
        the copies are on the CPU. UsageError where another library calls it for what is not collective.
        """
        if from_global is None:
            if advice_for_caller(_ADVICE, ""):
                ensure_whole()
            from_global = whole.in_parts
        if not from_global:
            return whole.own_state_dict()
        if not 0 <= root < world.size:
            raise UsageError(f"optimizer.state_dict(root={root}): ranks are 0 to {world.size - 1}")
        state = gather_optimizer(whole, everywhere=root != 0)
        return state if world.rank == root else optimizer_elsewhere()

    def load_state_dict(state_dict: Mapping[str, Any], from_global: bool | None = None) -> None:
        """The class's own, or with `from_global` from such a state, given on every rank. Collective.

        Unless `from_global` is given, it is True where ranks have different parts of the state, but for a state that is
        one of this rank's part alone.
        """
        if from_global is None:
            from_global = whole.in_parts and not whole.is_own(state_dict)
        if from_global:
            load_optimizer(whole, state_dict)
        else:
            whole.own_load_state_dict(dict(state_dict))

    optimizer.__reduce_ex__ = reduce  # type: ignore[method-assign]
    optimizer.state_dict = state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]
    return whole
