"""Ownership of a wrapped model's parameters and buffers: which rank holds which tensors.

The user's parameter objects stay the same. The memory of parameters of other stages is freed, and any use of their
values is an error (`absent`). A stage computes with *aliases* of its own parameters, which share their memory;
gradients accumulate in the aliases until they are reduced.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from rannd.errors import StepError
from rannd.plan.deployment import Deployment
from rannd.runtime.comm.context import Context
from rannd.runtime.parameters.absent import all_present, is_absent, make_absent
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.tensor_swap import give, hollow
from rannd.runtime.transport.transport import finish


class GradientDtypes(NamedTuple):
    """Types of a parameter's gradient on its way."""

    accumulated: torch.dtype
    """Over the microbatches of a rank, and over several backwards."""
    reduced: torch.dtype
    """Between ranks that hold the parameter."""
    given: torch.dtype
    """In ``parameter.grad``."""


@functools.cache
def _gradient_dtypes(given: torch.dtype, asked: str) -> GradientDtypes:
    reduced = given if asked == "auto" or given.is_complex else getattr(torch, asked)
    return GradientDtypes(torch.promote_types(given, reduced), reduced, given)


class Shared(Protocol):
    """What replicas of a stage share of their parameters."""

    def __contains__(self, name: str) -> bool:
        """Whether each replica has a piece of a parameter's gradient; not of one that other stages read as well."""

    @property
    def waits(self) -> bool:
        """Whether there are gradients that were not delivered yet."""

    def gradient(self, name: str) -> torch.Tensor | None:
        """The whole of a parameter's gradient. Collective of the replicas."""

    def whole_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor that each replica has a piece of, as of parameter `name`. Collective of the
        replicas."""

    def restore(self) -> None:
        """Give the replicas whole parameters back. Collective of the replicas."""


class Parameters:
    """Parameters and buffers of a deployed model. The constructor is collective."""

    def __init__(
        self,
        context: Context,
        owners: Mapping[str, tuple[int, ...]],
        deployment: Deployment,
        values: InitialValues,
    ) -> None:
        self._context = context
        self._world = world = context.world
        self.owners = owners
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[str, str] = {}
        """Maps each name to the first name of its tensor (tied parameters have several)."""
        first: dict[int, str] = {}
        for name, tensor in self._all():
            self.names[name] = first.setdefault(id(tensor), name)
            self.tensors.setdefault(self.names[name], tensor)
        self.slots: dict[str, tuple[int, ...]] = {
            name: tuple(sorted({slot for number in stages for slot in deployment.stages[number].slots}))
            for name, stages in owners.items()
        }
        self.own = [name for name in self.tensors if world.slot in self.slots[name]]
        self.writers = divide_writing(self.tensors, self.slots, world.rank_of_slot)
        """The rank that saves a tensor, by its first name."""
        settled = values.fill(self.own, self.tensors)
        if context.options.sync:
            self._from_rank_0(settled)
        self._settle(stay=deployment.offload_params)
        self.aliases: dict[str, torch.Tensor] = {}
        self.shared: Shared | None = None
        """What the replicas of this rank's stage share."""
        self.sharded: frozenset[str] = frozenset()
        """Parameters of which this rank has a piece of the values (ZeRO 3)."""
        self.refresh()

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._context.model.named_parameters(remove_duplicate=False)
        yield from self._context.model.named_buffers(remove_duplicate=False)

    def _from_rank_0(self, settled: Collection[str]) -> None:
        """Send rank 0's values to all ranks that hold them, since ranks may have been seeded differently.

        Tensors in `settled` are skipped: their ranks have initialized or loaded them already, with equal values.
        """
        if self._world.size == 1:
            return
        for name, tensor in self.tensors.items():
            if name in settled:
                continue
            holders = [self._world.rank_of_slot[slot] for slot in self.slots[name]]
            if self._world.rank == 0:
                source = tensor.detach().cpu().contiguous()
                with self._world.watch.inside("broadcast"):
                    works = [dist.isend(source, rank, group=self._world.control) for rank in holders if rank != 0]
                    for work in works:
                        finish(work)
            elif self._world.rank in holders:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
                with self._world.watch.inside("broadcast"):
                    dist.recv(buffer, 0, group=self._world.control)
                with torch.no_grad():
                    tensor.copy_(buffer)

    def _settle(self, *, stay: bool) -> None:
        """Free the memory of other ranks' tensors, and move this rank's to the device.

        `stay`: parameters stay where they are until `to_device`, because all of them may not fit.
        """
        own = set(self.own)
        for name, tensor in self.tensors.items():
            if name in own:
                if not (stay and tensor.requires_grad):
                    self._move(tensor)
                continue
            if tensor.is_meta:
                give(tensor, hollow(tensor))
            # Integers are kept for later graphs: code that is traced may branch on them.
            floating = tensor.is_floating_point() or tensor.is_complex()
            make_absent(tensor, hollow(tensor, tensor.device) if floating else tensor.data, self._holder(name))

    def to_device(self) -> None:
        """Move parameters that have stayed elsewhere, and are whole, to the device."""
        for name in self.own:
            if name not in self.sharded:
                self._move(self.tensors[name])
        self.refresh()

    def _move(self, tensor: torch.Tensor) -> None:
        if tensor.device != self._world.device:
            tensor.data = tensor.data.to(self._world.device)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(self._world.device)

    def _holder(self, name: str) -> str:
        """Name, ranks and stages of a tensor, for messages."""
        ranks = sorted(self._world.rank_of_slot[slot] for slot in self.slots[name])
        return f"{name} on {_counted('rank', ranks)} ({_counted('stage', self.owners[name])})"

    def everywhere(self, name: str) -> bool:
        """Whether every rank holds a tensor, by its first name."""
        return len(self.slots[name]) == self._world.size

    def adopt(self) -> None:
        """Adopt buffers that the script has replaced by other tensors; StepError for replaced parameters."""
        own = set(self.own)
        for name, tensor in self._all():
            first = self.names.get(name)
            if first is None or first != name:
                if first is None:
                    raise StepError(
                        f"the model has a new parameter or buffer {name} since it was deployed; wrap the model again"
                    )
                continue
            old = self.tensors[first]
            if tensor is old:
                continue
            if isinstance(tensor, nn.Parameter) or isinstance(old, nn.Parameter) or tensor.shape != old.shape:
                raise StepError(
                    f"{name} was replaced by another object since the model was deployed; change its values in place"
                )
            self.tensors[first] = tensor
            if first in own:
                tensor.data = tensor.data.to(self._world.device)
        self.refresh()

    def refresh(self) -> None:
        """Update the aliases of parameters whose memory or requires_grad has changed."""
        for name in self.own:
            tensor = self.tensors[name]
            if not isinstance(tensor, nn.Parameter):
                self.aliases[name] = tensor
                continue
            alias = self.aliases.get(name)
            if alias is not None and name in self.sharded:
                pass
            elif alias is None or alias.data_ptr() != tensor.data_ptr() or alias.shape != tensor.shape:
                pending = None if alias is None else alias.grad
                alias = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
                alias.grad_dtype = self.gradient_dtypes(name).accumulated
                alias.grad = pending
                self.aliases[name] = alias
            elif alias.grad is None:
                alias.grad_dtype = self.gradient_dtypes(name).accumulated
            alias.requires_grad_(tensor.requires_grad)

    def gradient_dtypes(self, name: str) -> GradientDtypes:
        """Types of a parameter's gradient: `reduce_dtype`, and ``grad_dtype``, which is float32 with master weights.

        A type that is narrower than the parameter's is for what ranks send alone.
        """
        tensor = self.tensors[name]
        return _gradient_dtypes(tensor.grad_dtype or tensor.dtype, self._context.config.reduce_dtype)

    @property
    def waits(self) -> bool:
        """Whether there are gradients that were not reduced yet."""
        shared = self.shared is not None and self.shared.waits
        return shared or any(self.aliases[name].grad is not None for name in self.trainable())

    def gradient(self, name: str) -> torch.Tensor | None:
        """The whole of a parameter's gradient. Collective of the ranks that hold it."""
        return self.tensors[name].grad if self.shared is None else self.shared.gradient(name)

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, which this rank has for parameter `name`, or the whole of it where it is a piece.

        Collective of the ranks that hold the parameter.
        """
        return self.shared.whole_of(name, tensor) if self.shared is not None and name in self.sharded else tensor

    def trainable(self) -> list[str]:
        """Names of the trainable parameters that this rank holds, in the model's order."""
        return [
            name
            for name in self.own
            if isinstance(self.tensors[name], nn.Parameter) and self.tensors[name].requires_grad
        ]

    @contextlib.contextmanager
    def hollow(self) -> Iterator[Sequence[torch.Tensor]]:
        """During tracing, make every tensor contiguous and on the CPU, as in an undeployed model, without its memory.

        Yields the tensors whose memory is uninitialized.
        """
        absent = {name for name, tensor in self.tensors.items() if is_absent(tensor)}
        with all_present(self.tensors.values()):
            before = {name: tensor.data for name, tensor in self.tensors.items()}
            empty = []
            try:
                for name, tensor in self.tensors.items():
                    # One NaN in place of many is not contiguous, but for a tensor of one element.
                    lost = name in absent and (tensor.is_floating_point() or tensor.is_complex())
                    if lost or not tensor.is_contiguous() or tensor.device.type != "cpu":
                        tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype)
                        empty.append(tensor)
                yield empty
            finally:
                for name, tensor in self.tensors.items():
                    tensor.data = before[name]


def divide_writing(
    tensors: Mapping[str, torch.Tensor], slots: Mapping[str, tuple[int, ...]], rank_of_slot: Sequence[int]
) -> dict[str, int]:
    """Divide what several ranks hold alike among them, by bytes, largest first; the same on all ranks.

    Only trainable parameters are equal on all of them: of others, such as running means, the first rank's count.
    """
    found = {name: rank_of_slot[held[0]] for name, held in slots.items()}
    shared = [name for name, each in tensors.items() if isinstance(each, nn.Parameter) and each.requires_grad]
    load = dict.fromkeys(rank_of_slot, 0)
    size = {name: each.numel() * each.itemsize for name, each in tensors.items()}
    for name in size.keys() - set(shared):
        load[found[name]] += size[name]
    for name in sorted(shared, key=size.__getitem__, reverse=True):
        found[name] = min((rank_of_slot[slot] for slot in slots[name]), key=lambda rank: (load[rank], rank))
        load[found[name]] += size[name]
    return found


def _counted(noun: str, numbers: Sequence[int]) -> str:
    return f"{noun}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
