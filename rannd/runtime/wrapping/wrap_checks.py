"""Checks what is passed to `RaNNCModule`, before anything is done with it."""

from __future__ import annotations

import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.parameters.tensor_swap import plain_tensors
from rannd.runtime.wrapping import registry


def check_model(model: object) -> None:
    """UsageError for what cannot be wrapped."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"RaNNCModule wraps a torch.nn.Module, not a {type(model).__qualname__}")
    registry.ensure_free(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "RaNNCModule traces a model's Python code, which a ScriptModule does not have; wrap the module that it was "
            "made from"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *plain_tensors(model)):
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"{name} of the model has the layout {tensor.layout}; graphs and what ranks send each other have dense "
                "tensors only: make it one with to_dense() before the model is wrapped"
            )


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """UsageError for what is no optimizer of the model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__qualname__}; pass a torch.optim.Optimizer")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            "the optimizer has none of the model's parameters; create it from the parameters of the model that is "
            "wrapped, after any code that replaces them"
        )
