"""Where each value and gradient of a step comes from: what a stage should have received, by what ranks kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from rannd.graph.partition.cut import crossing_shape
from rannd.graph.rows.loss_weights import counted, pieces_weights
from rannd.runtime.audit.block_replay import ReplayBlock
from rannd.runtime.audit.differences import Measure, wide
from rannd.runtime.audit.record_exchange import Tensors
from rannd.runtime.binding.bound_graph import BoundGraph
from rannd.runtime.binding.microbatches import Pieces
from rannd.runtime.comm.world import World


@dataclass(frozen=True)
class StepFacts:
    """What a step is, beside the values in it."""

    call: int
    """Number of the call, of which random numbers depend."""
    seed: int
    pieces: Pieces
    inside: bool
    """Whether backward ran inside the call."""
    loss_seed: float
    """Gradient of the loss that such a backward starts with."""
    averaged: int
    """Number of mini-batches that gradients are averaged over."""
    divided: int
    """What that gradient of the loss was divided by, instead of the sums of gradients: `averaged`, or 1."""


class Origins:
    """Which rank has what of a step, and what was sent where.

    Args:
        ask: As `RecordExchange.ask`: what a rank kept under a key.
        label: Names of nodes in the records.
    """

    def __init__(
        self,
        world: World,
        bound: BoundGraph,
        facts: StepFacts,
        ask: Callable[..., Tensors],
        label: Mapping[Node, str],
    ) -> None:
        self.graph = bound.graph
        self.facts = facts
        self.layout = bound.traffic_of(inside=facts.inside).layout
        self.stages = [bound.anywhere(number) for number in range(len(self.layout.stages))]
        self.pieces = [piece for piece, rows in enumerate(facts.pieces.rows) if rows]
        self.maker = {
            node: ReplayBlock(stage, number)
            for stage in self.stages
            for number, segment in reversed(list(enumerate(stage.segments)))
            for node in segment.part.outputs
            if node in stage.part.outputs
        }
        """The block that computes a value for other stages, or for the script."""
        self._world = world
        self._inside = bound.interleaved if facts.inside else None
        self._ask = ask
        self._label = label
        self.live = self._inside.live if self._inside is not None else bound.live(self._given_everywhere())
        """Nodes with a gradient."""

    def rank(self, stage: int, piece: int) -> int:
        """The rank that computes a stage for a microbatch; stage -1: the rank whose mini-batch it is of."""
        return self._world.rank_of_slot[self.layout.slot_of(stage, piece)]

    def ranks(self, stage: int) -> list[int]:
        """The replicas of a stage."""
        return [self._world.rank_of_slot[slot] for slot in self.layout.stages[stage]]

    def pieces_by_rank(self, stage: int) -> dict[int, list[int]]:
        """The microbatches of each replica of a stage."""
        found: dict[int, list[int]] = {}
        for piece in self.pieces:
            found.setdefault(self.rank(stage, piece), []).append(piece)
        return found

    def named(self, node: Node) -> str:
        """What a value is for the user."""
        module = node.meta.get("module") or ""
        if node.op == "placeholder":
            place = self.graph.traced.placeholders.index(node)
            specs = self.graph.signature.tensors
            return specs[place].name if place < len(specs) else f"the loss weight {node.name}"
        return f"value {node.name}" + (f" of {module}" if module else "")

    def at(self, piece: int) -> str:
        """Where a microbatch comes from."""
        microbatch, slot = divmod(piece, self.layout.world)
        return f"piece {piece} (microbatch {microbatch} of rank {self._world.rank_of_slot[slot]})"

    # -- values ---------------------------------------------------------------------------------------------------

    def sent(self, node: Node, piece: int) -> tuple[str, torch.Tensor | None, Measure]:
        """What a stage should have got: from where, the value, and how exactly."""
        if node.op == "placeholder":
            rank = self.rank(-1, piece)
            place = self.graph.traced.placeholders.index(node)
            given = len(self.graph.signature.tensors)
            if place < given:
                leaf = self._ask(rank, "leaf", place)[""]
                first, rows = self.facts.pieces.slices[piece]
                batch = self.graph.signature.tensors[place].batch
                return f"rank {rank}", leaf[first : first + rows] if batch else leaf, Measure(exact=True)
            return f"rank {rank}", self._weights(rank, piece)[place - given].cpu(), Measure()
        stage = self.maker[node].stage.number
        return f"stage {stage} on rank {self.rank(stage, piece)}", self.made(node, piece), Measure(exact=True)

    def made(self, node: Node, piece: int) -> torch.Tensor | None:
        """What the stage that computes a value has made of it."""
        block = self.maker[node]
        rank = self.rank(block.stage.number, piece)
        return self._ask(rank, "made", block.stage.number, piece, block.number).get(self._label[node])

    def shared_part(self, place: int, rank: int) -> torch.Tensor | None:
        """The part of rank 0's tensor `place` that a rank should have, if all ranks share rank 0's mini-batch."""
        whole = self._ask(0, "whole", place).get("")
        if whole is None or not self.graph.signature.tensors[place].batch:
            return whole
        rows, slot = self.facts.pieces.rank_rows, self._world.rank_of_slot.index(rank)
        return whole.narrow(0, sum(rows[:slot]), rows[slot])

    def _weights(self, rank: int, piece: int) -> tuple[torch.Tensor, ...]:
        """The loss weights of a microbatch, see rannd.graph.rows.loss_weights."""
        sizes, device, counts = self.facts.pieces, self._world.device, {}
        own = sizes.rank_rows[self._world.rank_of_slot.index(rank)]
        if self.graph.label_counts is not None:
            places = range(len(self.graph.signature.tensors))
            whole = [self._ask(0, "whole", place) for place in places]
            leaves = whole if any(whole) else [self._ask(rank, "leaf", place) for place in places]
            tensors = [each[""].to(device) for each in leaves]
            counts = counted(self.graph.label_counts, tensors, own / sizes.total if any(whole) else 1.0)
        return pieces_weights(
            self.graph.weights,
            world=self.facts.averaged,
            rows=sizes.rows[piece],
            rank_rows=own,
            total_rows=sizes.total,
            counts=counts,
            device=device,
        )

    # -- gradients ------------------------------------------------------------------------------------------------

    def seed(self, node: Node, block: ReplayBlock, piece: int) -> torch.Tensor | None:
        """The gradient with which the backward of a block starts at one of its outputs; None if there is none."""
        stage, label = block.stage, self._label[node]
        parts: list[torch.Tensor] = []
        for number in range(len(stage.segments) - 1, block.number, -1):
            if node in stage.segments[number].part.inputs:
                parts += only(self._ask(self.rank(stage.number, piece), "found", stage.number, piece, number), label)
        if node in stage.part.outputs and node in self.live:
            for reader in self.stages:
                if reader is not stage and node in reader.part.inputs:
                    parts += only(self._ask(self.rank(reader.number, piece), "left", reader.number, piece), label)
            parts.extend(self._from_script(node, piece))
        if not parts:
            return None
        return torch.stack(list(map(wide, parts))).sum(0).to(parts[0].dtype) if len(parts) > 1 else parts[0]

    def factor(self, rank: int) -> float:
        """What held gradients are multiplied with, when the script calls backward."""
        if self._inside is None:
            return 1.0
        place = self.graph.traced.results.index(self._inside.loss)
        given = self._ask(rank, "given").get(str(place))
        return 0.0 if given is None else float(given) / self.facts.loss_seed

    def _given_everywhere(self) -> tuple[bool, ...]:
        """Which outputs have a gradient on some rank."""
        told = [self._ask(rank, "given").keys() for rank in range(self._world.size)]
        return tuple(any(str(place) in each for each in told) for place in range(len(self.graph.traced.results)))

    def _from_script(self, node: Node, piece: int) -> Iterator[torch.Tensor]:
        """Gradients with which the backward of a microbatch starts at an output."""
        dtype = node.meta["val"].dtype
        if self._inside is not None:
            if node is self._inside.loss:
                yield torch.full((), self.facts.loss_seed / self.facts.divided, dtype=dtype)
            return
        rank = self.rank(-1, piece)
        first, rows = self.facts.pieces.slices[piece]
        mine = self.facts.pieces.of_slot(self.layout.slot_of(-1, piece))
        for place, (each, result) in enumerate(zip(self.graph.traced.results, self.graph.results, strict=True)):
            if each is not node or result.kind == "number":
                continue
            given = self._ask(rank, "given").get(str(place))
            if given is None or (result.kind == "first" and piece != mine[0]):
                yield torch.zeros(crossing_shape(node, rows), dtype=dtype)
            elif result.kind == "rows" and len(mine) > 1:
                inner = crossing_shape(node, rows)[result.dim] // rows
                yield given.narrow(result.dim, first * inner, rows * inner).to(dtype)
            else:
                yield given.to(dtype)


def only(tensors: Tensors, name: str) -> Sequence[torch.Tensor]:
    """The tensor of that name, if there is one."""
    return [tensors[name]] if name in tensors else []
