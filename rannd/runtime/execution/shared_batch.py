"""Option `gather_inputs=False`: rank 0's mini-batch is the global batch, and every rank gets all outputs.

Rank 0's tensors are broadcast; each rank runs a part of the rows, or rank 0 all of them if rows depend on each other.
Results are those of a single process with that batch: losses and gradients are not averaged over ranks, and the
gradients of outputs are rank 0's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.fx import Node

from rannd.errors import StepError
from rannd.graph.call.signature import Call
from rannd.graph.fx.sizes import number_at
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import crossing_shape
from rannd.graph.rows.loss_weights import Result
from rannd.runtime.binding.microbatches import split_rows
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.comm.world import World
from rannd.runtime.execution.outputs import NotSent


class _TensorMetadata(msgspec.Struct, frozen=True):
    """Metadata of a tensor broadcast by rank 0."""

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool


def from_rank_0(world: World, call: Call) -> Call:
    """Replace this rank's tensors in a call by rank 0's. Collective; StepError if the numbers of tensors differ."""
    return from_rank(world, call, 0)


def from_rank(world: World, call: Call, source: int) -> Call:
    """Replace this rank's tensors in a call by those of rank `source`. Collective, as `from_rank_0`."""
    if world.size == 1:
        return call
    mine = [_TensorMetadata(tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in call.tensors]
    told = msgspec.msgpack.decode(
        world.broadcast_bytes(msgspec.msgpack.encode(mine), source), type=list[_TensorMetadata]
    )
    counts = [count for (count,) in world.gather_numbers([len(call.tensors)])]
    if len(set(counts)) > 1:
        other = next(rank for rank, count in enumerate(counts) if count != counts[0])
        raise StepError(
            f"rank 0 passes {counts[0]} tensors, rank {other} {counts[other]}; with gather_inputs=False the values of "
            "other ranks do not matter, but their arguments have to be of the same structure as rank 0's"
        )
    tensors = list(call.tensors)
    for place, each in enumerate(told):
        sent = tensors[place].detach().to(world.device).contiguous() if world.rank == source else None
        if sent is None:
            sent = torch.empty(each.shape, dtype=getattr(torch, each.dtype), device=world.device)
        _broadcast(world, sent, source)
        if world.rank != source:
            tensors[place] = sent.requires_grad_(each.requires_grad)
    return dataclasses.replace(call, tensors=tuple(tensors))


def rows_by_slot(world: World, graph: ModelGraph, rows: int) -> tuple[int, ...]:
    """Number of rows that each slot runs."""
    if graph.coupled is not None:
        return tuple(rows if rank == 0 else 0 for rank in world.rank_of_slot)
    return tuple(count for _, count in split_rows(rows, world.size))


class Share:
    """This rank's part of rank 0's batch in one call. All methods except `inputs` are collective."""

    def __init__(self, world: World, graph: ModelGraph, rows: tuple[int, ...]) -> None:
        """`rows`: number of rows per slot."""
        self._world = world
        self._graph = graph
        self._rows = rows
        self._total = sum(rows)
        self._first = sum(rows[: world.slot])
        self._own = rows[world.slot]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Slice the tensors to the rows of this rank."""
        specs = self._graph.signature.tensors
        return [
            tensor.narrow(0, self._first, self._own) if spec.batch else tensor
            for spec, tensor in zip(specs, tensors, strict=True)
        ]

    def outputs(self, outputs: Sequence[Any]) -> list[Any]:
        """Gather the outputs of the whole batch from the parts of all ranks."""
        return [
            self._whole(node, result, value)
            for node, result, value in zip(self._graph.traced.results, self._graph.results, outputs, strict=True)
        ]

    def _whole(self, node: Node, result: Result, value: Any) -> Any:
        if result.kind == "number":
            return number_at(node.meta["val"], self._total)
        if isinstance(value, NotSent):
            return NotSent.like(value, crossing_shape(node, self._total))
        if result.kind == "global" or self._world.size == 1:
            return value
        if result.kind == "rows":
            parts = [self._from_slot(slot, node, value, count) for slot, count in enumerate(self._rows) if count]
            return torch.cat(parts, result.dim) if len(parts) > 1 else parts[0]
        if result.kind == "sum":
            whole = value if self._own else torch.zeros(crossing_shape(node, 1), dtype=node.meta["val"].dtype)
            whole = whole.detach().to(self._world.device).contiguous().clone()
            dist.all_reduce(whole, group=self._everyone())
            return whole
        slot = next(slot for slot, count in enumerate(self._rows) if count)
        return self._from_slot(slot, node, value, self._rows[slot])

    def gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Broadcast rank 0's gradients of the whole batch's outputs, and slice them to this rank's part."""
        world = self._world
        meet(world, Phase.BACKWARD)
        flags = list(world.broadcast_bytes(bytes(gradient is not None for gradient in gradients)))
        found: list[torch.Tensor | None] = []
        slots = [slot for slot, count in enumerate(self._rows) if count]
        for node, result, gradient, flag in zip(
            self._graph.traced.results, self._graph.results, gradients, flags, strict=True
        ):
            if not flag or result.kind == "number":
                found.append(None)
                continue
            shape = crossing_shape(node, self._total)
            sent = gradient.detach().to(world.device).contiguous() if world.rank == 0 and gradient is not None else None
            whole = sent if sent is not None else torch.empty(shape, dtype=node.meta["val"].dtype, device=world.device)
            _broadcast(world, whole, 0)
            if result.kind == "rows":
                inner = shape[result.dim] // self._total
                whole = whole.narrow(result.dim, self._first * inner, self._own * inner)
            elif result.kind == "first" and world.slot != slots[0]:
                found.append(None)
                continue
            found.append(whole)
        return found

    def input_gradients(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gather the gradients of rank 0's tensors from the parts of all ranks; every rank gets the same."""
        if self._world.size == 1:
            return list(gradients)
        found: list[torch.Tensor | None] = []
        for spec, gradient in zip(self._graph.signature.tensors, gradients, strict=True):
            if gradient is None:
                found.append(None)
            elif spec.batch:
                parts = []
                for slot, count in enumerate(self._rows):
                    part = gradient.contiguous()
                    if slot != self._world.slot:
                        part = gradient.new_empty((count, *gradient.shape[1:]))
                    _broadcast(self._world, part, self._world.rank_of_slot[slot])
                    parts.append(part)
                found.append(torch.cat(parts))
            else:
                whole = gradient.clone()
                dist.all_reduce(whole, group=self._everyone())
                found.append(whole)
        return found

    def _from_slot(self, slot: int, node: Node, value: Any, rows: int) -> torch.Tensor:
        """Broadcast the output of the rank in `slot`."""
        device = self._world.device
        mine = value.detach().to(device).contiguous() if slot == self._world.slot else None
        part = (
            mine
            if mine is not None
            else torch.empty(crossing_shape(node, rows), dtype=node.meta["val"].dtype, device=device)
        )
        _broadcast(self._world, part, self._world.rank_of_slot[slot])
        return part

    def _everyone(self) -> dist.ProcessGroup | None:
        return self._world.group_of(tuple(range(self._world.size)))


def _broadcast(world: World, tensor: torch.Tensor, source: int) -> None:
    if tensor.numel() and world.size > 1:
        dist.broadcast(tensor, source, group=world.group_of(tuple(range(world.size))))
