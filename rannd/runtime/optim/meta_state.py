"""State that an optimizer's constructor has made of parameters on the meta device, made again once they have values.

Adagrad, for one, gives every parameter a sum of squares when it is made. Of a parameter without values that sum has no
values either.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.utils._pytree as pytree

from rannd.errors import UsageError


def check_settings(optimizer: torch.optim.Optimizer) -> None:
    """UsageError where a group has a setting without values (a learning rate in a tensor, made on the meta device)."""
    for group in optimizer.param_groups:
        lost = [key for key, value in group.items() if key != "params" and _without_values(value)]
        if lost:
            raise UsageError(
                f"setting {lost[0]!r} of the optimizer is a tensor on the meta device; make the optimizer outside of "
                "torch.device('meta') and DistributeModelParams"
            )


def remake_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, name: str) -> None:
    """Give the state of a parameter, which has values now, what its optimizer's class begins with, where it has none.

    UsageError where the class cannot be made again from a group's settings, or does not make such state.
    """
    state: dict[str, Any] = optimizer.state[parameter]
    lost = [key for key, value in state.items() if _without_values(value)]
    if not lost:
        return
    fresh = _fresh(optimizer, group, parameter, name)
    for key in lost:
        if key not in fresh:
            raise UsageError(
                f"the optimizer's state {key!r} of {name} has no values: it was given to a parameter on the meta "
                "device, where they are lost; load the optimizer's state after the first call of the model, or with "
                "pyrannc.load_checkpoint"
            )
        state[key] = fresh[key]


def _without_values(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in pytree.tree_leaves(value))


def _fresh(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, name: str
) -> dict[str, Any]:
    """The state that the optimizer's class gives a parameter when it is made with a group's settings."""
    kind = type(optimizer)
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    known = inspect.signature(kind.__init__).parameters
    arguments = {key: value for key, value in settings.items() if key in known}
    try:
        made = kind([{**settings, "params": [parameter]}], **arguments)
    except Exception as exc:  # the user's classes raise what they like
        raise UsageError(
            f"the optimizer's constructor has given {name} state without values (meta device), and {kind.__qualname__} "
            f"cannot be made again from its groups' settings: {type(exc).__name__}: {exc}; let its constructor take "
            "them as arguments of the same names"
        ) from exc
    return dict(made.state.get(parameter, {}))
