"""Master weights: float32 copies of half-precision parameters (or of pieces of them), which an optimizer steps.

A step that is smaller than half the distance to the next number of a bfloat16 parameter is lost; its float32 copy takes
it, and the parameter gets the rounded value. What the optimizer keeps of the parameter is float32 then, too. Between
steps the copy is an entry of the parameter's state, `MASTER`, so that it goes where the state goes: into checkpoints,
to other plans, back at `undeploy`.

Nothing here knows of optimizers' steps or of replicas; see `sharded_step.py`.

Source: Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MASTER = "master_param"
"""Key of the copy in ``optimizer.state[parameter]``."""
HALF = (torch.bfloat16, torch.float16)
"""Types of parameters that have one."""


def take_master(values: torch.Tensor, part: nn.Parameter | None, state: dict[str, Any]) -> nn.Parameter:
    """The float32 copy of `values` that an optimizer is to step; the state becomes that of the copy.

    Args:
        values: A half-precision parameter or piece. Where it is not what the copy rounds to (the script has changed it,
            or loaded another model) the copy takes its value.
        part: What this has returned last, reused if the state has the same memory.
        state: The optimizer's state of the parameter, without which the copy begins with the parameter's values.
    """
    master = state.pop(MASTER, None)
    for key, value in state.items():  # made by the class's constructor, or in steps without masters
        state[key] = _widened(value)
    if master is None:
        return nn.Parameter(values.float())
    if master.dtype != torch.float32 or master.device != values.device:
        master = master.to(values.device, torch.float32)
    rounded = master.to(values.dtype)
    # On CPUs bits are compared, which is faster; elsewhere the host would wait for the device.
    if values.device.type != "cpu" or not torch.equal(rounded.view(torch.int16), values.view(torch.int16)):
        master.copy_(torch.where(rounded == values, master, values))
    return part if part is not None and part.data_ptr() == master.data_ptr() else nn.Parameter(master)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, dict):
        return {key: _widened(each) for key, each in value.items()}
    return type(value)(map(_widened, value)) if type(value) in (list, tuple) else value


def widen_gradient(parameter: torch.Tensor) -> None:
    """Let a parameter have a float32 gradient."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = torch.float32
    parameter.grad = None if gradient is None else gradient.float()
