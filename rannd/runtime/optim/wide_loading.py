"""Lets ``optimizer.load_state_dict`` keep float32 state of half-precision parameters; torch rounds it to their type."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from rannd import log
from rannd.runtime.optim.placeholder import without_placeholder
from rannd.runtime.zero.master_weights import HALF, MASTER

_MARK = "_rannd_wide_loading"


def keep_wide_state(optimizer: torch.optim.Optimizer, *, tells: bool) -> None:
    """From now on, an optimizer with master weights loads state in the types that it has.

    `tells`: warn once if a loaded state has no master weights, which then begin as the rounded parameters.
    """
    if _MARK not in optimizer.__dict__:
        optimizer.__dict__[_MARK] = _WideLoading(tells)
        optimizer.register_load_state_dict_pre_hook(optimizer.__dict__[_MARK].before)
        optimizer.register_load_state_dict_post_hook(optimizer.__dict__[_MARK].after)


class _WideLoading:
    def __init__(self, tells: bool) -> None:
        self._tells = tells
        self._loading: Mapping[str, Any] = {}

    def before(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        self._loading = state

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the tensors that were rounded in their place again."""
        given, self._loading = self._loading, {}
        numbers = chain.from_iterable(group["params"] for group in given["param_groups"])
        held = chain.from_iterable(map(without_placeholder, optimizer.param_groups))
        bare = False
        for number, parameter in zip(numbers, held, strict=False):
            saved = given["state"].get(number)
            if parameter.dtype in HALF and isinstance(saved, dict) and saved:
                optimizer.state[parameter] = _wide(saved, optimizer.state[parameter], parameter.device)
                bare |= MASTER not in saved
        if bare and self._tells:
            self._tells = False
            log.get("RaNNCModule").warning(
                "The optimizer's state that was loaded has no master weights: they begin with the values of the "
                "parameters, which are rounded to bfloat16 or float16"
            )


def _wide(saved: Any, loaded: Any, device: torch.device) -> Any:
    """What was loaded, with tensors of the types that were saved; one that torch has left where it was stays there."""
    if isinstance(loaded, torch.Tensor):
        same = not isinstance(saved, torch.Tensor) or saved.dtype == loaded.dtype
        return loaded if same else saved.to(device)
    if isinstance(loaded, dict):
        return {key: _wide(saved[key], each, device) for key, each in loaded.items()}
    if type(loaded) in (list, tuple):
        return type(loaded)(_wide(*each, device) for each in zip(saved, loaded, strict=True))
    return loaded
