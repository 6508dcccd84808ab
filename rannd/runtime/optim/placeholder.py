"""A parameter for ranks that have none to train: GradScaler and some optimizers cannot do without.

It always has a gradient, of zeros, and appears neither in ``optimizer.state_dict()`` nor in the model nor in norms.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rannd.torch_mends import ADAGRAD_BEGINS_AT_ONCE

_MARK = "_rannd_placeholder"


class Placeholder(nn.Parameter):
    """One zero, whose gradient is zero unless somebody sets another one; `zero_grad` sets zero."""

    _gradient: torch.Tensor | None

    @property
    def grad(self) -> torch.Tensor | None:
        """Never None: optimizers step, GradScaler finds something to check."""
        if self.__dict__.get("_gradient") is None:
            zero = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self._gradient = zero.to_sparse() if self.__dict__.get("_sparse") else zero
            self._gradient.__dict__[_MARK] = True
        return self._gradient

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._gradient = value


def is_placeholder(tensor: Any) -> bool:
    """Whether something is a placeholder, or the gradient of one."""
    return isinstance(tensor, Placeholder) or (isinstance(tensor, torch.Tensor) and _MARK in tensor.__dict__)


def without_placeholder(group: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters of a group of an optimizer that are somebody's."""
    return [parameter for parameter in group["params"] if not isinstance(parameter, Placeholder)]


def placeholder_gradient(optimizer: torch.optim.Optimizer | None) -> torch.Tensor | None:
    """The gradient of an optimizer's placeholder, None where it has none."""
    if optimizer is None:
        return None
    held = [each for group in optimizer.param_groups for each in group["params"]]
    return next((each.grad for each in held if isinstance(each, Placeholder)), None)


def trains(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer has a parameter to train, be it a placeholder."""
    return any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"])


def add_placeholder(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Put one at the end of the first group of an optimizer, and let no state_dict show it."""
    made = Placeholder(torch.zeros(1, 1, device=device))  # Muon wants matrices
    made.__dict__["_sparse"] = isinstance(optimizer, torch.optim.SparseAdam)
    optimizer.param_groups[0]["params"].append(made)
    if _MARK not in optimizer.__dict__:
        optimizer.__dict__[_MARK] = True
        optimizer.register_state_dict_post_hook(_hide)
        optimizer.register_load_state_dict_pre_hook(_make_room)
        if ADAGRAD_BEGINS_AT_ONCE and isinstance(optimizer, torch.optim.Adagrad):
            optimizer.register_step_pre_hook(_begin)


def _there(optimizer: torch.optim.Optimizer) -> bool:
    held = optimizer.param_groups[0]["params"]
    return bool(held) and isinstance(held[-1], Placeholder)


def _begin(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give the placeholder the state that Adagrad gives others when it is made."""
    if not _there(optimizer):
        return
    group = optimizer.param_groups[0]
    placeholder = group["params"][-1]
    if not optimizer.state[placeholder]:
        known = inspect.signature(torch.optim.Adagrad).parameters.keys() - {"params"}
        made = torch.optim.Adagrad([placeholder], **{key: group[key] for key in known & group.keys()})
        optimizer.state[placeholder] = made.state[placeholder]


def _hide(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state without the placeholder, which is the last parameter of the first group."""
    if not _there(optimizer):
        return state
    groups = [dict(group) for group in state["param_groups"]]
    number = groups[0]["params"][-1]
    groups[0]["params"] = groups[0]["params"][:-1]
    for group in groups:  # numbers go on without a gap
        group["params"] = [place - (place > number) for place in group["params"]]
    kept = {
        place - (isinstance(place, int) and place > number): value
        for place, value in state["state"].items()
        if place != number
    }
    return {**state, "state": kept, "param_groups": groups}


def _make_room(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The opposite: a number for the placeholder, which has no state."""
    if not _there(optimizer):
        return state
    groups = [dict(group) for group in state["param_groups"]]
    if not groups or len(groups[0]["params"]) == len(optimizer.param_groups[0]["params"]):
        return state
    number = len(groups[0]["params"])
    for group in groups:
        group["params"] = [place + (place >= number) for place in group["params"]]
    groups[0]["params"] = [*groups[0]["params"], number]
    kept = {place + (isinstance(place, int) and place >= number): each for place, each in state["state"].items()}
    return {**state, "state": kept, "param_groups": groups}
