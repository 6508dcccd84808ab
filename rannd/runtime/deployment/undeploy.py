"""Undoes a deployment: every rank gets the whole model and the whole optimizer state back.

Parameters and buffers stay the same objects; values, gradients and optimizer state are sent by the first of the ranks
that hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rannd.errors import StepError
from rannd.runtime.comm.gather_objects import agree_on_errors
from rannd.runtime.comm.world import World
from rannd.runtime.optim.global_optimizer import whole_optimizer
from rannd.runtime.optim.optimizer_state import gather_states
from rannd.runtime.parameters.absent import make_present
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.parameters.state_dict import gather_tensor
from rannd.runtime.zero.tensor_piece import TensorPiece


class Origin:
    """Devices of the model's tensors before the deployment."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.devices = {name: tensor.device for name, tensor in tensors}


def gathered_states(world: World, parameters: Parameters, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Return the whole optimizer's state, by parameter. Collective; the caller has synchronized the ranks.

    StepError if gradients were not reduced yet; UsageError if the optimizer's state cannot be sent. Nothing is changed.
    """
    waits = parameters.waits
    error = "gradients were not reduced yet (delay_grad_allreduce(True)): call model.allreduce_grads() before it"
    agree_on_errors(world, f"model.undeploy(): {error}" if waits else "", StepError)
    return {} if optimizer is None else gather_states(whole_optimizer(optimizer, world), parameters)


def undeploy(
    world: World,
    parameters: Parameters,
    origin: Origin,
    optimizer: torch.optim.Optimizer | None,
    states: Mapping[str, Any],
) -> None:
    """Restore the whole model and optimizer on every rank. Collective.

    `states`: those of the optimizer, as `gathered_states` returned them.
    """
    if parameters.shared is not None:
        parameters.shared.restore()
    for name, tensor in parameters.tensors.items():
        _restore(world, parameters, origin, name, tensor)
    _gradients(world, parameters)
    if optimizer is not None:
        whole = whole_optimizer(optimizer, world)
        whole.forget(parameters)
        whole.give({parameters.tensors[name]: state for name, state in states.items()})


def _restore(world: World, parameters: Parameters, origin: Origin, name: str, tensor: torch.Tensor) -> None:
    """Restore the value and device of one tensor on all ranks."""
    value = gather_tensor(world, parameters, name, everywhere=True)
    assert value is not None
    home = origin.devices.get(name, tensor.device)
    home = torch.device("cpu") if home.type == "meta" else home
    if name in parameters.own and tensor.device == home:
        return  # this rank holds it, and on the right device
    gradient = tensor.grad
    make_present(tensor)
    tensor.grad = None
    tensor.data = value.to(home)
    if gradient is not None:
        tensor.grad = gradient.to(home)


def gather_gradient(world: World, parameters: Parameters, name: str) -> torch.Tensor | None:
    """Copy a parameter's reduced gradient to the CPU of every rank; None if it has no gradient. Collective.

    It has the parameter's dtype, or float32 (master weights).
    """
    tensor = parameters.tensors[name]
    holders = [world.rank_of_slot[slot] for slot in parameters.slots[name]]
    holder = holders[0]
    # of a parameter that replicas share, all of them have a piece
    gradient = parameters.gradient(name) if world.rank in holders else None
    if world.rank != holder:
        gradient = None
    if world.size == 1:
        return None if gradient is None else gradient.detach().to("cpu", copy=True)
    there = torch.tensor([0 if gradient is None else 1 if gradient.dtype == tensor.dtype else 2])
    with world.watch.inside("broadcast"):
        dist.broadcast(there, holder, group=world.control)
    if not int(there):
        return None
    dtype = tensor.dtype if int(there) == 1 else torch.float32
    value = torch.empty(tensor.shape, dtype=dtype)
    if gradient is not None:
        dense = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
        value = dense.to("cpu", dtype, copy=True).contiguous()
    with world.watch.inside("broadcast"):
        dist.broadcast(value, holder, group=world.control)
    return value


def _gradients(world: World, parameters: Parameters) -> None:
    """Restore the gradient of every parameter on all ranks."""
    own = set(parameters.own)
    for name, tensor in parameters.tensors.items():
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        gradient = gather_gradient(world, parameters, name)
        if name not in own or isinstance(tensor.grad, TensorPiece):
            tensor.grad = None
            if gradient is not None and gradient.dtype != tensor.grad_dtype:
                tensor.grad_dtype = gradient.dtype
            tensor.grad = None if gradient is None else gradient.to(tensor.device)
