"""Reduce an optimizer to the parameters that this rank holds."""

from __future__ import annotations

import torch

from rannd.runtime.parameters import Parameters


def keep_own(optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
    """Edit the optimizer in place: groups keep their order and settings, state of other ranks' parameters goes."""
    by_id = {id(tensor): name for name, tensor in parameters.tensors.items()}
    own = set(parameters.own)
    for group in optimizer.param_groups:
        group["params"][:] = [p for p in group["params"] if by_id.get(id(p)) is None or by_id[id(p)] in own]
    for parameter in list(optimizer.state):
        name = by_id.get(id(parameter))
        if name is None:
            continue
        if name not in own:
            del optimizer.state[parameter]
            continue
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor) and value.ndim and value.device != parameter.device:
                optimizer.state[parameter][key] = value.to(parameter.device)
