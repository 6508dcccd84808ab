"""Give a reduced gradient to the user's parameter as autograd would: hooks see it, once, and then it is added."""

from __future__ import annotations

import torch

from rannd.errors import StepError


def hooked(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """What hooks of ``register_hook`` make of a reduced gradient, in the order in which they were made.

    StepError for what is no gradient of the parameter.
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
        gradient = changed.to(device=parameter.device, dtype=parameter.dtype)
    return gradient


def give(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a reduced gradient to `parameter`; where no gradients are recorded.

    Its hooks get it first; hooks of ``register_post_accumulate_grad_hook`` get the parameter afterwards.
    """
    gradient = hooked(name, parameter, gradient)
    afterwards = parameter._post_accumulate_grad_hooks
    if parameter.grad is None:
        parameter.grad = gradient.detach()
    else:
        parameter.grad.add_(gradient)  # in place, as autograd does: others may have that tensor
    for after in list(afterwards.values()) if afterwards else ():
        after(parameter)
