"""Take a deployment back: every rank gets the whole model and the whole optimizer again.

Parameters and buffers keep their objects; values, gradients and the optimizer's state come from the rank that holds
each (the first one, where there are several). Nothing is pickled: what the optimizer keeps of a parameter travels as
plain values and tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from rannd.errors import RanndError, StepError, UsageError
from rannd.runtime.optimizer import WholeOptimizer
from rannd.runtime.parameters import Parameters
from rannd.runtime.state import gather_tensor
from rannd.runtime.world import World


class Origin:
    """Where tensors were before a deployment."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.devices = {name: tensor.device for name, tensor in tensors}


def undeploy(world: World, parameters: Parameters, origin: Origin, optimizer: torch.optim.Optimizer | None) -> None:
    """Make the model and the optimizer whole on every rank. Collective.

    StepError where gradients wait for their reduction; UsageError where the optimizer's state cannot be sent. Nothing
    has changed then.
    """
    waits = any(parameters.aliases[name].grad is not None for name in parameters.trainable())
    mine: dict[str, list[Any]] = {}
    error: RanndError | None = None
    if waits:
        error = StepError(
            "gradients wait for their reduction (delay_grad_allreduce(True)): call model.allreduce_grads() before "
            "model.undeploy()"
        )
    elif optimizer is not None:
        try:
            mine = _described(world, parameters, optimizer)
        except UsageError as exc:
            error = exc
    told = msgspec.msgpack.encode((type(error).__name__ if error else "", str(error or ""), mine))
    everyone = [msgspec.msgpack.decode(data, type=tuple[str, str, dict[str, Any]]) for data in world.gather_bytes(told)]
    if error is not None:
        raise error
    for rank, (kind, text, _) in enumerate(everyone):
        if kind:
            raise (StepError if kind == "StepError" else UsageError)(f"rank {rank}: {text}")
    described = {name: state for _, _, states in everyone for name, state in states.items()}
    for name, tensor in parameters.tensors.items():
        _restore(world, parameters, origin, name, tensor)
    _gradients(world, parameters)
    if optimizer is not None:
        _states(world, parameters, optimizer, described)
        WholeOptimizer.of(optimizer, world).forget(parameters)


def _holder(world: World, parameters: Parameters, name: str) -> int:
    return world.rank_of_slot[parameters.slots[name][0]]


def _restore(world: World, parameters: Parameters, origin: Origin, name: str, tensor: torch.Tensor) -> None:
    """Give one tensor its value and its place again, on all ranks."""
    value = gather_tensor(world, parameters, name, everywhere=True)
    assert value is not None
    home = origin.devices.get(name, tensor.device)
    home = torch.device("cpu") if home.type == "meta" else home
    if name in parameters.own and tensor.device == home:
        return  # it is here
    gradient = tensor.grad
    tensor.grad = None
    tensor.data = value.to(home)
    if gradient is not None:
        tensor.grad = gradient.to(home)


def gather_gradient(world: World, parameters: Parameters, name: str) -> torch.Tensor | None:
    """A copy on the CPU of a parameter's reduced gradient, on every rank; None where it has none. Collective."""
    tensor = parameters.tensors[name]
    holder = _holder(world, parameters, name)
    gradient = tensor.grad if world.rank == holder else None
    if world.size == 1:
        return None if gradient is None else gradient.detach().to("cpu", copy=True)
    there = torch.tensor([int(gradient is not None)])
    dist.broadcast(there, holder, group=world.control)
    if not int(there):
        return None
    value = torch.empty(tensor.shape, dtype=tensor.dtype)
    if gradient is not None:
        dense = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
        value = dense.to("cpu", tensor.dtype, copy=True).contiguous()
    dist.broadcast(value, holder, group=world.control)
    return value


def _gradients(world: World, parameters: Parameters) -> None:
    """Give every parameter its gradient, on all ranks."""
    own = set(parameters.own)
    for name, tensor in parameters.tensors.items():
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        gradient = gather_gradient(world, parameters, name)
        if name not in own:
            tensor.grad = None if gradient is None else gradient.to(tensor.device)


# -- the optimizer's state ----------------------------------------------------------------------------------------


def _described(world: World, parameters: Parameters, optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Key, kind and value (or type, shape and place) of what the optimizer keeps of the parameters sent from here."""
    found: dict[str, list[Any]] = {}
    for name in parameters.own:
        tensor = parameters.tensors[name]
        if tensor not in optimizer.state or _holder(world, parameters, name) != world.rank:
            continue
        entries: list[Any] = []
        for key, value in optimizer.state[tensor].items():
            if not isinstance(key, str):
                raise UsageError(f"the optimizer's state of {name} has the key {key!r}; only texts can be sent")
            if isinstance(value, torch.Tensor):
                dtype = str(value.dtype).removeprefix("torch.")
                entries.append((key, "tensor", [dtype, list(value.shape), value.device.type == "cpu"]))
            elif value is None or isinstance(value, (bool, int, float, str)):
                entries.append((key, "value", value))
            elif isinstance(value, (list, tuple)) and all(isinstance(v, (bool, int, float, str)) for v in value):
                entries.append((key, "tuple" if isinstance(value, tuple) else "list", list(value)))
            else:
                raise UsageError(
                    f"the optimizer's state of {name} has a {type(value).__qualname__} in {key!r}; tensors, numbers "
                    "and texts can be sent: drop it from optimizer.state before model.undeploy()"
                )
        found[name] = entries
    return found


def _states(
    world: World, parameters: Parameters, optimizer: torch.optim.Optimizer, described: Mapping[str, list[Any]]
) -> None:
    """Give every rank the whole state."""
    own = set(parameters.own)
    for name, tensor in parameters.tensors.items():
        if name not in described:
            continue
        holder = _holder(world, parameters, name)
        state: dict[str, Any] = {}
        for key, kind, value in described[name]:
            if kind == "tensor":
                state[key] = _sent(world, holder, optimizer.state[tensor][key] if world.rank == holder else None, value)
                if not (value[2] and state[key].ndim == 0):  # counters may stay on the CPU
                    state[key] = state[key].to(tensor.device)
            else:
                state[key] = tuple(value) if kind == "tuple" else value
        if name not in own:
            optimizer.state[tensor] = state
        else:
            for key, each in optimizer.state[tensor].items():
                if isinstance(each, torch.Tensor) and each.ndim and each.device != tensor.device:
                    optimizer.state[tensor][key] = each.to(tensor.device)


def _sent(world: World, holder: int, tensor: torch.Tensor | None, description: Sequence[Any]) -> torch.Tensor:
    """One tensor of a state, on all ranks."""
    dtype, shape, _ = description
    value = torch.empty(shape, dtype=getattr(torch, dtype))
    if tensor is not None:
        value = tensor.detach().to("cpu", copy=True).contiguous()
    if world.size > 1:
        dist.broadcast(value, holder, group=world.control)
    return value
