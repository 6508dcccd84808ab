"""Give a reduced gradient to the user's parameter as autograd would: hooks see it, once, and then it is added."""

from __future__ import annotations

import torch

from rannd.errors import StepError


def give(name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a reduced gradient to `parameter`; where no gradients are recorded.

    Hooks of ``register_hook`` get it first, in the order in which they were made, and may return another one; hooks of
    ``register_post_accumulate_grad_hook`` get the parameter afterwards. StepError for what is no gradient of it.
    """
    hooks, afterwards = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
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
    if parameter.grad is None:
        parameter.grad = gradient.detach()
    else:
        parameter.grad.add_(gradient)  # in place, as autograd does: others may have that tensor
    for after in list(afterwards.values()) if afterwards else ():
        after(parameter)
