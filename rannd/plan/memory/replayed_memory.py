"""Adds to a deployment the most bytes that its devices have in use at a time, from a replay of its Program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.deployment import Deployment
from rannd.plan.memory.op_bytes import OpBytes, SavedBytes
from rannd.plan.memory.slot_lives import Holding, MessageBytes, most_bytes
from rannd.plan.memory.stage_lives import StageLives
from rannd.plan.plan_options import PlanOptions
from rannd.plan.precision import state_weights
from rannd.plan.schedule.instructions import instructions
from rannd.plan.schedule.program import ActionKind, Edge, Layout, Program
from rannd.plan.schedule.schedules import gpipe, planned_program
from rannd.plan.simulate.layout import layout_of, loss_layout, piece_rows
from rannd.plan.simulate.repeats import repeats
from rannd.profile.costs import BlockCost

MOST_WORK = 20_000
"""Operators and actions up to which a plan is replayed: some tenths of a second."""


def replayed(
    graph: TaskGraph,
    blocks: Sequence[Block],
    costs: Sequence[BlockCost],
    deployment: Deployment,
    options: PlanOptions,
    *,
    interleaved: bool = True,
) -> Deployment:
    """Return the deployment with `most_bytes` of its stages.

    Plans are returned as they are if they share gradients or parameters between replicas (ZeRO 2 and 3) or offload
    something: there the sums of docs/planning.md count. So are plans of more than `MOST_WORK` operators and actions.

    Args:
        graph: The task graph.
        blocks: Its blocks.
        costs: Their costs.
        deployment: A plan for it.
        options: Say what gradients and optimizer state take.
        interleaved: Whether backward begins inside the call.
    """
    if deployment.zero >= 2 or any(deployment.offloads):
        return deployment
    replay = _Replay(graph, blocks, costs, deployment, options, interleaved=interleaved)
    found = replay.slots()
    stages = []
    for stage in deployment.stages:
        most = max((found[slot] for slot in stage.slots if slot in found), default=0)
        stages.append(replace(stage, estimate=replace(stage.estimate, most_bytes=most)))
    return replace(deployment, stages=tuple(stages))


class _Replay:
    def __init__(
        self,
        graph: TaskGraph,
        blocks: Sequence[Block],
        costs: Sequence[BlockCost],
        deployment: Deployment,
        options: PlanOptions,
        *,
        interleaved: bool,
    ) -> None:
        self._graph, self._deployment, self._options = graph, deployment, options
        self._interleaved = interleaved
        whole = layout_of(graph, deployment)
        self._layout = loss_layout(whole) if interleaved else whole
        self._rows = piece_rows(deployment.batch_rows, whole.world, whole.microbatches)
        self._of = OpBytes(graph, self._rows)
        self._saved = SavedBytes(self._of, blocks, costs)
        number_of = {op.name: number for number, op in enumerate(graph.ops)}
        self._ops = [sorted(number_of[name] for name in stage.ops) for stage in deployment.stages]
        stage_of = {op: number for number, own in enumerate(self._ops) for op in own}
        self._params: list[set[int]] = [{i for op in own for i in graph.ops[op].params} for own in self._ops]
        weights = [state_weights(param.itemsize, options) for param in graph.params]
        sizes = [float(param.bytes) if param.trainable else 0.0 for param in graph.params]
        self._reduced = [size * each.reduced for size, each in zip(sizes, weights, strict=True)]
        given = [param.itemsize * 1.0 for param in graph.params]
        for number, param in enumerate(graph.params):
            if options.master_weights and param.itemsize == 2:
                given[number] = 4.0
        self._given = [
            size * each / param.itemsize for size, each, param in zip(sizes, given, graph.params, strict=True)
        ]
        self._fresh = sizes
        self._summed = [max(one, other) for one, other in zip(self._given, self._reduced, strict=True)]
        self._edges = self._edge_values(stage_of)
        self._lives: dict[int, StageLives] = {}
        self._delaying: frozenset[int] = frozenset()
        """Stages whose backward comes in two halves."""

    def _edge_values(self, stage_of: Mapping[int, int]) -> dict[Edge, list[int]]:
        last = len(self._deployment.stages)
        found: dict[Edge, list[int]] = defaultdict(list)
        targets: dict[int, set[int]] = defaultdict(set)
        for index, op in enumerate(self._graph.ops):
            for read in op.inputs:
                targets[read].add(stage_of[index])
        for index, value in enumerate(self._graph.values):
            home = stage_of[value.producer] if value.producer >= 0 else -1
            if value.is_output and value.is_sent and home >= 0:
                targets[index].add(last)
            for target in targets[index] - {home}:
                found[home, target].append(index)
        return found

    def _parcels(self) -> tuple[dict[Edge, MessageBytes], dict[Edge, MessageBytes]]:
        of = self._of
        views = frozenset(
            index for index, value in enumerate(self._graph.values)
            if value.producer >= 0 and of.memory.view[value.producer]
        )  # fmt: skip
        values = {edge: MessageBytes.of({v: of.size[v] for v in own}, views) for edge, own in self._edges.items()}
        grads = {
            edge: MessageBytes.of({v: of.size[v] for v in own if of.graded[v]}, frozenset())
            for edge, own in self._edges.items()
        }
        return values, grads

    def _stage(self, number: int) -> StageLives:
        if number not in self._lives:
            stage = self._deployment.stages[number]
            segment_of = dict(zip(stage.ops, stage.segment_of, strict=False))
            segments: list[tuple[list[int], bool]] = [([], again) for again in stage.segments]
            for op in self._ops[number]:
                segments[segment_of.get(self._graph.ops[op].name, 0)][0].append(op)
            leaving = {value for (home, _), own in self._edges.items() if home == number for value in own}
            leaving |= {
                value for op in self._ops[number] for value in self._graph.ops[op].outputs
                if self._graph.values[value].is_output
            }  # fmt: skip
            self._lives[number] = StageLives(
                self._of,
                self._saved,
                segments,
                leaving,
                split=number in self._delaying,
                fresh=self._fresh,
                summed=self._summed,
            )
        return self._lives[number]

    def slots(self) -> dict[int, int]:
        """Return the most bytes of slots: of the first one of each kind."""
        found: dict[int, int] = {}
        parcels = self._parcels()
        split = frozenset(
            number for number, stage in enumerate(self._deployment.stages) if stage.estimate.weight_us > 0
        )
        for repeat in repeats(self._layout, ()):
            block = repeat.block
            if block.pieces_total * sum(map(len, block.stages)) + len(self._graph.ops) > MOST_WORK:
                return {}
            program = self._program(block, split)
            phases = [[list(actions) for actions in phase] for phase in program.phases]
            if program.interleaved:
                phases = phases[:1]
            place = repeat.places[0]
            self._delaying |= {
                block.stage_at(own, action) for own, actions in enumerate(program.slots) for action in actions
                if action.kind is ActionKind.WEIGHT
            }  # fmt: skip
            seen: set[tuple[tuple[int, ...], int]] = set()
            for own in range(block.world):
                stages = block.stages_of(own)
                kind = stages, len(block.pieces(stages[0], own))
                if kind in seen:
                    continue
                seen.add(kind)
                most = most_bytes(
                    [instructions(phase, own) for phase in phases],
                    {number: self._stage(number) for number in stages},
                    parcels,
                    self._holding(stages),
                    stages[0],
                    len(block.stages),
                )
                found[place[own]] = max(found.get(place[own], 0), most)
        return found

    def _program(self, layout: Layout, split: frozenset[int]) -> Program:
        if not self._interleaved:
            return gpipe(layout)
        return planned_program(self._deployment.schedule, layout, split)

    def _holding(self, stages: Sequence[int]) -> Holding:
        graph, deployment, layout = self._graph, self._deployment, self._layout
        own = {index for number in stages for index in self._params[number]}
        if 0 in stages:
            own |= set(graph.unused_params)
        holders: dict[int, set[int]] = defaultdict(set)
        for number, params in enumerate(self._params):
            for index in params & own:
                holders[index] |= set(layout.stages[number])
        trained = [index for index in sorted(own) if graph.params[index].trainable and holders[index]]
        several = [index for index in trained if len(holders[index]) > 1]
        optimizer = sum(deployment.stages[number].estimate.optimizer_bytes for number in stages)
        given = sum(self._given[index] for index in trained)
        wide = [
            index
            for index in trained
            if self._given[index] != self._reduced[index] or self._given[index] != self._fresh[index]
        ]
        largest = max((self._given[index] for index in trained), default=0.0)
        foreach = given if self._options.device not in ("cpu", "auto") else 0.0
        border = [
            value for number, value in enumerate(graph.values)
            if value.producer < 0 or (value.is_output and value.is_sent)
        ]  # fmt: skip
        ranks = sum(max(value.bytes.at(self._rows), 0.0) for value in border) * layout.microbatches
        outputs = sum(max(value.bytes.at(self._rows), 0.0) for value in border if value.producer >= 0)
        return Holding(
            always=sum(graph.params[index].bytes for index in own) + optimizer + given + ranks,
            reduced={index: self._reduced[index] for index in several},
            groups={index: tuple(sorted(holders[index])) for index in several},
            delivered=sum(self._summed[index] + self._given[index] for index in wide) + outputs * layout.microbatches,
            stepping=max(2.0 * largest, foreach),
            overlap=not self._options.sync_allreduce,
        )
