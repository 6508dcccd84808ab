"""The whole model's state, gathered from the ranks that hold its parts, and given back to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.parameters import Parameters
from rannd.runtime.world import World


def gather_tensor(world: World, parameters: Parameters, name: str, *, everywhere: bool) -> torch.Tensor | None:
    """A copy on the CPU of a parameter or buffer, on rank 0 (or all ranks); None on the others. Collective."""
    tensor = parameters.tensors[name]
    holder = world.rank_of_slot[parameters.slots[name][0]]
    mine = tensor.detach().to("cpu", copy=True).contiguous() if world.rank == holder else None
    if everywhere and world.size > 1:
        mine = mine if mine is not None else torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.broadcast(mine, holder, group=world.control)
    elif holder != 0:
        if world.rank == holder:
            assert mine is not None
            dist.send(mine, 0, group=world.control)
            return None
        if world.rank == 0:
            mine = torch.empty(tensor.shape, dtype=tensor.dtype)
            dist.recv(mine, holder, group=world.control)
    return mine if everywhere or world.rank == 0 else None


def gather_state(world: World, parameters: Parameters, model: nn.Module, *, everywhere: bool) -> dict[str, Any]:
    """The model's state_dict with whole tensors on the CPU; empty on ranks that do not get it. Collective."""
    template = nn.Module.state_dict(model, keep_vars=True)
    gathered: dict[str, torch.Tensor | None] = {}
    state: OrderedDict[str, Any] = OrderedDict()
    for name, value in template.items():
        first = parameters.names.get(name)
        if first is None:  # extra state, which is the same everywhere
            state[name] = value
            continue
        if first not in gathered:
            gathered[first] = gather_tensor(world, parameters, first, everywhere=everywhere)
        state[name] = gathered[first]
    return state if everywhere or world.rank == 0 else OrderedDict()


def scatter_state(parameters: Parameters, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Load a whole state into what this rank holds; missing and unexpected keys as in ``load_state_dict``."""
    known = set(nn.Module.state_dict(model, keep_vars=True))
    missing = [name for name in known if name not in state]
    unexpected = [name for name in state if name not in known]
    if strict and (missing or unexpected):
        raise UsageError(
            f"the state does not belong to this model: missing {sorted(missing)}, unexpected {sorted(unexpected)}"
        )
    own = set(parameters.own)
    fitting = {
        name: parameters.tensors[first] for name, first in parameters.names.items() if first in own and name in state
    }
    for name, tensor in fitting.items():
        if state[name].shape != tensor.shape:
            raise UsageError(
                f"{name} has shape {tuple(state[name].shape)} in the state and {tuple(tensor.shape)} in the model"
            )
    with torch.no_grad():
        for name, tensor in fitting.items():
            tensor.copy_(state[name])
    return torch.nn.modules.module._IncompatibleKeys(missing, unexpected)
