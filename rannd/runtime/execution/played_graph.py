"""A bound graph as the microbatches of a step need it: its stages on this rank, its inputs, messages and sums.

Which graph a microbatch runs depends on the rank that it comes from: mini-batches of other sizes, such as sequences of
other lengths, have graphs of their own. Their microbatches can be in one step if stages do the same for all of them,
in the same order, but with values of other sizes (`PlayedGraph.plays_like`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from rannd.plan.schedule.instructions import Instruction, instructions
from rannd.plan.schedule.program import COMPUTATIONS, OF_GRADIENTS, Action
from rannd.runtime.binding.bound_graph import BoundGraph
from rannd.runtime.binding.microbatches import Pieces
from rannd.runtime.binding.slot_tensors import SlotTensors
from rannd.runtime.comm.context import Context
from rannd.runtime.compiling.compiled_stage import CompiledStage
from rannd.runtime.execution.global_sums import Totals
from rannd.runtime.execution.inputs import MiniBatch
from rannd.runtime.execution.p2p import Parcel
from rannd.runtime.execution.stage import Computing
from rannd.runtime.gradients.sharded_gradients import ShardedGradients
from rannd.runtime.zero.state_home import StateHome

MOST_SIZES = 64
"""Maximum number of cached mini-batch sizes."""


class PlayedGraph:
    """A bound graph with `state`, the tensors of this rank's stages by name.

    Args:
        context: Of the wrapped model.
        bound: The graph.
        state: See above.
        sharded: What the replicas of this rank's stages share of the gradients of their parameters.
        seed: Base seed of random numbers.
        compiled: Code of the segments of each stage, by its number; a stage without any runs eagerly.
        home: Where values that segments recompute from are between forward and backward; None: in the device's memory.
    """

    def __init__(
        self,
        context: Context,
        bound: BoundGraph,
        state: Mapping[str, torch.Tensor],
        sharded: ShardedGradients | None,
        seed: int,
        compiled: Mapping[int, Sequence[CompiledStage]],
        home: StateHome | None = None,
    ) -> None:
        world = context.world
        self.bound = bound
        self.tensors = SlotTensors(world, bound, state, None if sharded is None else sharded.values)
        self.stages: Mapping[int, Computing] = {
            stage.number: Computing(
                context, bound, stage, self.tensors, seed, compiled.get(stage.number, ()), sharded, home
            )
            for stage in bound.stages
        }
        """This rank's stages by number, ascending."""
        self.mini_batch = MiniBatch(bound.graph, bound.slot, world.device, context.averaged)
        """This rank's inputs and their gradients."""
        self.totals = Totals(world, bound.graph, context.averaged, len(bound.layout.stages))
        """Sums over the microbatches of all ranks."""
        self._posting = world.transport.posting
        self._parcels: dict[tuple[Any, ...], Parcel] = {}
        self._sizes: OrderedDict[tuple[int, ...], Pieces] = OrderedDict()
        self._instructions: OrderedDict[tuple[Any, ...], tuple[Instruction, ...]] = OrderedDict()

    def pieces(self, rows: tuple[int, ...]) -> Pieces:
        """Microbatches of a call with `rows` rows per slot."""
        if rows not in self._sizes:
            self._sizes[rows] = Pieces(self.bound.layout, rows)
            if len(self._sizes) > MOST_SIZES:
                self._sizes.popitem(last=False)
                self._parcels.clear()
        return self._sizes[rows]

    def instructions(self, pieces: Pieces, *, inside: bool, second: bool) -> tuple[Instruction, ...]:
        """Instructions of this slot for a phase of a call, without microbatches that have no rows.

        Where replicas share gradients, they stand by in their computations. `inside`: backward runs inside of the call,
        in its only phase. `second`: of two phases the second one, a backward that the script calls.
        """
        running = tuple(map(bool, pieces.rows))
        key = inside, second, running
        if key not in self._instructions:
            chosen = self.bound.traffic_of(inside=inside).program.phases[second]
            joint = COMPUTATIONS if self.bound.meets else ()
            slots = [[each for each in actions if running[each.piece] or each.kind in joint] for actions in chosen]
            self._instructions[key] = instructions(slots, self.bound.slot, self._posting)
            if len(self._instructions) > MOST_SIZES:
                self._instructions.popitem(last=False)
        return self._instructions[key]

    def parcel(self, action: Action, rows: int, live: frozenset[Node] | None, *, inside: bool) -> Parcel:
        """The values that a transfer moves for a microbatch of `rows` rows.

        `live`: nodes that get a gradient, needed for gradients only. `inside`: backward runs inside of the call.
        """
        of_gradients = action.kind in OF_GRADIENTS
        key = (inside, action.src, action.dst, rows, live if of_gradients else None)
        found = self._parcels.get(key)
        if found is None:
            nodes: Iterable[Node] = self.bound.traffic_of(inside=inside).edges[action.src, action.dst]
            if of_gradients:
                assert live is not None
                nodes = [node for node in nodes if node in live]
            found = self._parcels[key] = Parcel(tuple(nodes), rows)
        return found

    def plays_like(self, other: PlayedGraph) -> bool:
        """Whether microbatches of both can be in one step, as far as this rank's stages are concerned."""
        if self.totals.lengths != other.totals.lengths or self._results() != other._results():
            return False
        if len(self.bound.layout.stages) == 1 and not self.bound.meets:
            return True  # each rank computes its own microbatches, from the first operator to the last
        return (
            self.bound.traffic.program == other.bound.traffic.program
            and self._program_inside() == other._program_inside()
            and self.bound.borrowed == other.bound.borrowed
            and self._reads() == other._reads()
        )

    def _results(self) -> list[tuple[str, bool]]:
        """Of each output its kind, and whether it may get a gradient."""
        graph = self.bound.graph
        return [
            (result.kind, node in graph.placement.requires_grad)
            for node, result in zip(graph.traced.results, graph.results, strict=True)
        ]

    def _program_inside(self) -> object:
        return None if self.bound.interleaved is None else self.bound.interleaved.traffic.program

    def _reads(self) -> list[tuple[list[set[str]], dict[str, int]]]:
        """Of each stage the parameters and buffers that its segments read, and those with gradients that come late."""
        held = self.tensors.held.keys()
        return [
            (
                [set(segment.part.tensors) & held for segment in stage.segments],
                {name: count for name, count in self.stages[stage.number].late_arrivals.items() if name in held},
            )
            for stage in self.bound.stages
        ]
