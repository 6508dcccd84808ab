"""Accumulates reduced gradients into the user's parameters as autograd does, running the parameters' hooks once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rannd.errors import StepError


def hooked(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Run the hooks of ``register_hook`` on a reduced gradient, in the order of registration; returns their result.

    StepError if a hook returns something that is not a gradient of the parameter.
    """
    hooks = parameter._backward_hooks
    for hook in list(hooks.values()) if hooks else ():
        changed = hook(gradient)
        if changed is None:
            continue
        if not isinstance(changed, torch.Tensor) or changed.shape != parameter.shape:
            told = tuple(changed.shape) if isinstance(changed, torch.Tensor) else type(changed).__qualname__
            raise StepError(
                f"a hook of parameter {name} returned {told}; it has to return None or a tensor of shape "
                f"{tuple(parameter.shape)}"
            )
        gradient = changed.to(device=parameter.device, dtype=parameter.grad_dtype or parameter.dtype)
    return gradient


def give_all(given: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """`give` for each (name, parameter, gradient); those without hooks are added at once."""
    sums: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for name, parameter, gradient in given:
        there = parameter.grad
        hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if there is None or hooks or there.layout is not torch.strided or gradient.layout is not torch.strided:
            give(name, parameter, gradient)
        else:
            sums.append(there)
            gradients.append(gradient)
    if sums:
        torch._foreach_add_(sums, gradients)


def give(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Accumulate a reduced gradient into ``parameter.grad``; call it under torch.no_grad.

    Hooks of ``register_hook`` run before, those of ``register_post_accumulate_grad_hook`` after.
    """
    held = parameter._backward_hooks or gradient.requires_grad  # a hook may have kept it
    gradient = hooked(name, parameter, gradient)
    afterwards = parameter._post_accumulate_grad_hooks
    if parameter.grad is None:
        parameter.grad = gradient.detach() if held else gradient
    else:
        parameter.grad.add_(gradient)  # in place, as autograd does, because the script may hold this tensor
    for after in list(afterwards.values()) if afterwards else ():
        after(parameter)
