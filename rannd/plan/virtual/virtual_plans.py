"""Plans with several stages per slot: cut, fitted into memory and simulated.

All stages have equally many replicas. Cuts are those of `slot_cuts`; a slot that does not fit recomputes, each of its
stages in proportion to what it keeps. `virtual_search` chooses which of these plans are made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.blocks.cut_places import cut_places
from rannd.plan.deployment import FORMAT, Deployment, Slot, StageEstimate
from rannd.plan.plan_options import PlanOptions
from rannd.plan.precision import state_weights
from rannd.plan.schedule.in_flight import Flight, Flights, flights
from rannd.plan.schedule.program import Layout
from rannd.plan.simulate.layout import layout_and_costs, loss_layout, piece_rows
from rannd.plan.simulate.least_time import least_us
from rannd.plan.simulate.simulator import Simulation, predict
from rannd.plan.simulate.step_costs import StepCosts
from rannd.plan.slot_memory import together
from rannd.plan.stage_costs.estimate import StageTables
from rannd.plan.stage_costs.intervals import Intervals, at
from rannd.plan.stage_costs.recompute import DividedStage, least_memory, segments
from rannd.plan.stage_costs.shared_tables import SharedTables
from rannd.plan.stage_costs.stage_parts import StagePart, stages_of
from rannd.plan.topology import Machine, Mask, Table, p2p_us
from rannd.plan.virtual.slot_cuts import SlotCosts, SlotCuts, best_cuts
from rannd.plan.virtual.virtual_shapes import PASSES, Shape
from rannd.plan.zero import computing
from rannd.profile.costs import CostTable

ENOUGH = 0.005
"""How much longer a step may be, by the closed form, than with cuts that are perfectly even."""
HOST_US = 32.0
"""Time that each action takes of its slot's host (docs/benchmarks.md), where that was not measured."""
ROUNDED = 8
"""Bytes of a stage by which its estimate may exceed the tables: its parts are rounded up."""


class VirtualPlans:
    """Makes plans of one model for some devices."""

    def __init__(
        self,
        graph: TaskGraph,
        blocks: Sequence[Block],
        costs: CostTable,
        slots: tuple[Slot, ...],
        *,
        batch_rows: int,
        memory_bytes: int,
        options: PlanOptions,
        shared: SharedTables | None = None,
    ) -> None:
        """`shared`: tables of the graph on these devices, if they were made before."""
        self.graph, self.blocks, self.costs, self.slots = graph, blocks, costs, slots
        self.batch_rows, self.memory_bytes, self.options = batch_rows, memory_bytes, options
        self._shared = shared or SharedTables(
            Intervals(graph, blocks, costs.blocks, options), Machine(slots, costs.link, costs.between, costs.runtime)
        )
        self.intervals, self.machine = self._shared.intervals, self._shared.machine
        self.may_begin = np.array(cut_places(graph, [block.ops for block in blocks]))
        self._tables: dict[object, StageTables] = {}
        self._messages: dict[int, tuple[float, float]] = {}
        """What `_message_us` returned."""
        self._placed: dict[tuple[int, str], tuple[list[int], bool]] = {}
        """What `_nodes` returned, by number of positions and order of slots."""
        self._cuts: dict[object, SlotCuts | None] = {}
        self._fitted: dict[tuple[Shape, tuple[int, ...]], tuple[list[StagePart], int]] = {}

    @property
    def world(self) -> int:
        return len(self.slots)

    @property
    def host_us(self) -> float:
        """Time that each action takes of its slot's host: several stages per slot have more actions."""
        return self.costs.runtime.host_us or HOST_US

    def rows(self, microbatches: int) -> int:
        """Rows of the largest microbatch."""
        return piece_rows(self.batch_rows, self.world, microbatches)

    def table(self, shape: Shape) -> StageTables:
        """Return the costs of all runs of blocks as stages of a plan."""
        variant = msgspec.structs.replace(shape.variant, placement=self.machine.placements[0])
        key = variant, shape.replicas
        if key not in self._tables:
            count = len(self.blocks) + 1
            self._tables[key] = StageTables(
                self._shared,
                self.options,
                variant,
                rows=self.rows(shape.microbatches),
                limit=math.inf,
                allowed=np.ones((count, count), dtype=bool),
                replicas=np.array([shape.replicas]),
            )
        return self._tables[key]

    def hops_us(self, shape: Shape) -> tuple[float, float]:
        """Return the time of a usual message between neighbouring positions: the mean of these, and the slowest."""
        near, far = self._message_us(shape.microbatches)
        nodes, _ = self._nodes(shape)
        each = [near if one == other else far for one, other in pairwise(nodes)]
        return sum(each) / len(each), max(each)

    def _message_us(self, microbatches: int) -> tuple[float, float]:
        """Time of a usual message, inside a node and to another one."""
        if microbatches not in self._messages:
            places = np.flatnonzero(self.may_begin)[1:-1]
            sent = at(self.intervals.sent, self.rows(microbatches))[0, places] if len(places) else np.zeros(1)
            near, far = (float(np.median(p2p_us(link, sent))) for link in (self.machine.link, self.machine.between))
            self._messages[microbatches] = near, far
        return self._messages[microbatches]

    def _nodes(self, shape: Shape) -> tuple[list[int], bool]:
        """Node of the first slot of each position, and whether the replicas of each are on one node."""
        key = shape.positions, shape.placement
        if key not in self._placed:
            slots = shape.slots[: shape.positions]
            first = [self.slots[each[0]].node for each in slots]
            self._placed[key] = first, all(self._inside(each) for each in slots)
        return self._placed[key]

    def exposed_us(self, shape: Shape) -> float:
        """Return the reduction of a slot's gradients that does not overlap with its last backwards, and what follows.

        All stages count as equally large, and their last backwards as those of as many microbatches as positions.
        Gradients of parameters that the first and the last block read are reduced at the end, unless these are in the
        same slot.
        """
        tied = 0.0
        homes = shape.homes
        if homes[0] != homes[-1]:
            tied = self.machine.between.allreduce_us(self._tied_bytes, 2 * shape.replicas)
        if shape.replicas == 1:
            return tied
        inside, replicas = self._all_inside(shape), np.array([shape.replicas])
        end, reductions = len(self.blocks), self._shared.reductions
        found = reductions.of(end, replicas, inside, shape.mode.zero)
        whole, after = (float(each[0, 0]) / shape.positions for each in (found.whole, found.host))
        if shape.mode.zero in (1, 2):
            after += float(reductions.gather(end, replicas, inside)[0, 0]) / shape.positions
        if self.options.sync_allreduce:
            return whole + after + tied
        backward = float(at(self.intervals.backward, self.rows(shape.microbatches))[0, -1]) / shape.stages
        others = (shape.passes - 1) * shape.positions * backward
        return max(whole / shape.passes - backward, whole - others - backward, 0.0) + after + tied

    @cached_property
    def _tied_bytes(self) -> float:
        """Bytes to reduce of parameters that the first and the last block read."""
        both = self._reads(self.blocks[0].ops) & self._reads(self.blocks[-1].ops)
        held = [self.graph.params[index] for index in both]
        return sum(each.bytes * state_weights(each.itemsize, self.options).reduced for each in held if each.trainable)

    # -- cuts -------------------------------------------------------------------------------------------------

    def costs_of(self, shape: Shape, limit: float) -> SlotCosts:
        """Return what cuts are compared by, if devices have `limit` bytes."""
        table = self.table(shape)
        forward, backward = table.forward_us, table.backward_us + table.add_us
        if shape.mode.zero >= 2:
            inside = self._all_inside(shape)
            gather, fetch = np.zeros_like(forward), np.zeros_like(forward)
            for end in range(1, table.blocks + 1):
                gather[:end, end] = self._shared.reductions.gather(end, table.replicas, inside)[:, 0]
                fetch[:end, end] = table.fetch_us(end)[:, 0]
            forward, backward = computing(shape.mode.zero, forward, backward, gather, fetch)
        flown = self.flights(shape, frozenset(range(shape.stages)))
        held: dict[tuple[Flight, Flight], Table] = {}
        for flight, moments in zip(flown.most, flown.moments, strict=True):
            for moment in moments:
                if (flight, moment) not in held:
                    held[flight, moment] = table.memory.held_with(flight, moment)
        return SlotCosts(
            homes=shape.homes,
            pieces=int(table.counts.pieces[0]),
            rounds=forward + backward,
            fill=np.maximum(forward + backward - 2 * table.weight_us, forward),
            held=[
                [held[flight, moment] for moment in moments]
                for flight, moments in zip(flown.most, flown.moments, strict=True)
            ],
            working=table.memory.temporary(slice(None), slice(None))[:, :, 0],
            limit=limit - float(table.memory.late) - ROUNDED * shape.passes,
            may_begin=self.may_begin,
        )

    def cuts(self, shape: Shape, limit: float) -> SlotCuts | None:
        """Return the best cuts of a plan whose stages keep all activations; None if none fit `limit` bytes."""
        key = shape.costs_key, limit
        if key not in self._cuts:
            self._cuts[key] = best_cuts(self.costs_of(shape, limit), enough=ENOUGH)
        return self._cuts[key]

    @cached_property
    def shared_bytes(self) -> float:
        """What cuts may count too much of a slot: parameters that several of its stages read are held once."""
        readers = Counter(read for block in self.blocks for read in self._reads(block.ops))
        found = 0.0
        for index, count in readers.items():
            param = self.graph.params[index]
            weights = state_weights(param.itemsize, self.options)
            held = 1 + (weights.gradients + weights.optimizer) * param.trainable
            found += (count > 1) * param.bytes * held
        return found

    @cached_property
    def limits(self) -> list[float]:
        """Bytes to cut for where nothing is recomputed: any, as that may do; those that may do; those that do."""
        rounded = ROUNDED * max(PASSES)
        some = [self.memory_bytes + self.shared_bytes + rounded] if self.shared_bytes else []
        return [math.inf, *some, float(self.memory_bytes)]

    def _reads(self, ops: Sequence[int]) -> set[int]:
        """Parameters that operators read."""
        return {read for op in ops for read in self.graph.ops[op].params}

    def flights(self, shape: Shape, split: frozenset[int]) -> Flights:
        """Return what each stage keeps; `split`: the stages whose backward is split."""
        homes = shape.homes
        layout = Layout(shape.positions, shape.microbatches, tuple((home,) for home in homes), (), ())
        return flights(shape.schedule, layout, split if shape.delays else frozenset())

    # -- memory -----------------------------------------------------------------------------------------------

    def least_bytes(self, shape: Shape) -> float:
        """Return a lower bound of the memory of the fullest device: what all stages of a replica always hold."""
        return float(self.table(shape).memory.state.held.state[0, -1, 0]) / shape.positions

    def fitted(self, shape: Shape, starts: Sequence[int]) -> tuple[list[StagePart], int]:
        """Return the stages with given cuts, and the bytes of the fullest device.

        Slots that would not fit recompute, as little as does, or all.
        """
        key = shape, tuple(starts)
        if key not in self._fitted:
            self._fitted[key] = self._fit(shape, starts)
        return self._fitted[key]

    def _fit(self, shape: Shape, starts: Sequence[int]) -> tuple[list[StagePart], int]:
        table, homes = self.table(shape), shape.homes
        spans = list(zip(starts, (*starts[1:], len(self.blocks)), strict=True))
        apart = table.memory.state.apart
        chosen = [self._whole(table, *span, apart=apart) for span in spans]
        split = {stage for stage, span in enumerate(spans) if table.weight_us[span] > 0}
        asked = [self._asked(stage, shape.stages) for stage in range(shape.stages)]
        for stage in np.flatnonzero(asked).tolist():
            split.discard(stage)
            chosen[stage] = self._divided(table, spans[stage], 1, 0.0, apart=apart)
        parts, flown = self._parts(shape, spans, chosen, split)
        for home in range(shape.positions):
            own = [stage for stage, at in enumerate(homes) if at == home]
            if together([part.estimate for part in parts], flown, own) <= self.memory_bytes:
                continue
            # That nothing of its backwards is delayed may be enough.
            split -= set(own)
            parts, flown = self._parts(shape, spans, chosen, split)
            estimates = [part.estimate for part in parts]
            if together(estimates, flown, own) <= self.memory_bytes:
                continue
            needs = [estimates[stage].activation_bytes for stage in own]
            others = sum(estimates[stage].total_bytes - estimates[stage].working_bytes for stage in own) - sum(needs)
            room = self.memory_bytes - others - max(estimates[stage].working_bytes for stage in own)
            for stage, need in zip(own, needs, strict=True):
                if not asked[stage]:
                    budget = max(room, 0) * need / max(sum(needs), 1)
                    flying = estimates[stage].in_flight
                    chosen[stage] = self._divided(table, spans[stage], flying, budget, apart=apart)
        parts, flown = self._parts(shape, spans, chosen, split)
        estimates = [part.estimate for part in parts]
        slots = [[stage for stage, at in enumerate(homes) if at == home] for home in range(shape.positions)]
        return parts, max(together(estimates, flown, own) for own in slots)

    def deployment(self, shape: Shape, parts: Sequence[StagePart]) -> Deployment:
        """Return the deployment with these stages."""
        offload, again = self.table(shape).offload, any(any(each.divided.again) for each in parts)
        return Deployment(
            format=FORMAT,
            graph_hash=self.graph.graph_hash,
            slots=self.slots,
            stages=stages_of(self.graph, self.blocks, parts),
            microbatches=shape.microbatches,
            schedule=shape.schedule,
            batch_rows=self.batch_rows,
            step_us=0.0,
            unused_params=tuple(self.graph.params[index].name for index in self.graph.unused_params),
            placement=shape.placement,
            memory_bytes=self.memory_bytes,
            zero=shape.mode.zero,
            offload=offload.optimizer,
            offload_params=offload.params,
            offload_activations=offload.activations and again,
        )

    def _asked(self, stage: int, stages: int) -> bool:
        """Whether a stage recomputes because the configuration says so."""
        last = stage == stages - 1 and self.options.checkpointing_no_last
        return self.options.checkpointing and not last

    @staticmethod
    def _whole(table: StageTables, start: int, end: int, *, apart: bool) -> DividedStage:
        """A stage that recomputes nothing; `apart`: its blocks are segments."""
        ends = tuple(range(1, end - start + 1)) if apart else (end - start,)
        return DividedStage(ends, (False,) * len(ends), float(table.memory.kept[start, end]), 0.0, 0.0)

    def _divided(
        self, table: StageTables, span: tuple[int, int], flying: int, budget: float, *, apart: bool
    ) -> DividedStage:
        """The segments of a stage that keep at most `budget` bytes, or the least."""
        start, end = span
        if table.offload.activations:
            return table.away(start, end, flying, apart=apart)
        forward = np.diagonal(table.forward_us, 1)[start:end]
        activation = table.memory.kept[start : end + 1, start : end + 1]
        handed = self.intervals.handed(start, end, table.rows)
        found = segments(forward, activation, handed, flying, budget, apart=apart) if budget > 0 else None
        return found or least_memory(forward, activation, handed, flying, apart=apart)

    def _parts(
        self, shape: Shape, spans: Sequence[tuple[int, int]], chosen: Sequence[DividedStage], split: set[int]
    ) -> tuple[list[StagePart], Flights]:
        table = self.table(shape)
        flown = self.flights(shape, frozenset(split))
        every, homes = shape.slots, shape.homes
        found = []
        seen: dict[int, set[int]] = {}
        for stage, (start, end) in enumerate(spans):
            slots, home = every[stage], homes[stage]
            inside = np.array([self._inside(slots)])
            estimate = table.estimate_of(
                start, end, shape.replicas, chosen[stage], flown.most[stage], split=stage in split, inside=inside
            )
            params = {
                read for block in self.blocks[start:end] for op in block.ops for read in self.graph.ops[op].params
            }
            if home in seen:
                estimate = self._less(estimate, params & seen[home], late=math.floor(table.memory.late))
            seen[home] = seen.get(home, set()) | params
            found.append(StagePart(start, end, slots, chosen[stage], estimate))
        return found, flown

    def _all_inside(self, shape: Shape) -> Mask:
        """Whether the replicas of each stage are on one node: one entry."""
        return np.array([self._nodes(shape)[1]])

    def _inside(self, slots: Sequence[int]) -> bool:
        """Whether slots are on one node."""
        return len({self.slots[slot].node for slot in slots}) == 1

    def _less(self, estimate: StageEstimate, shared: set[int], *, late: int) -> StageEstimate:
        """Leave out what an earlier stage of the same slot counts: what ranks get, and shared parameters.

        These are whole under ZeRO, too. Optimizer state that is elsewhere is not divided by parameters.
        """
        param = grad = state = 0
        away = self.options.offload_optimizer == "true"
        for index in shared:
            each = self.graph.params[index]
            param += each.bytes
            if each.trainable:
                weights = state_weights(each.itemsize, self.options)
                grad += math.floor(each.bytes * weights.gradients)
                state += 0 if away else math.floor(each.bytes * weights.optimizer)
        return msgspec.structs.replace(
            estimate,
            param_bytes=estimate.param_bytes - param,
            grad_bytes=estimate.grad_bytes - grad,
            optimizer_bytes=estimate.optimizer_bytes - state,
            comm_bytes=estimate.comm_bytes - late,
            total_bytes=estimate.total_bytes - param - grad - state - late,
        )

    # -- time -------------------------------------------------------------------------------------------------

    def step_costs(self, deployment: Deployment, *, host_us: float | None = None) -> StepCosts:
        """Return the costs of the actions of a deployment, each of which takes `host_us` of its host.

        None: what is known of the runtime.
        """
        return self._laid_out(deployment, host_us)[1]

    def _laid_out(self, deployment: Deployment, host_us: float | None) -> tuple[Layout, StepCosts]:
        layout, costs = layout_and_costs(
            self.graph,
            deployment,
            self.costs.link,
            self.costs.between,
            overlap=not self.options.sync_allreduce,
            options=self.options,
            runtime=self.costs.runtime,
        )
        if host_us is not None:
            costs = msgspec.structs.replace(costs, host_us=host_us)
        return loss_layout(layout), costs

    def simulated(self, deployment: Deployment, *, host_us: float | None = None, memory: bool = False) -> Simulation:
        """Simulate a step of a deployment, also of one with one stage per slot. `memory`: peaks are asked for, too."""
        return predict(deployment.schedule, *self._laid_out(deployment, host_us), memory=memory)

    def least_us(self, deployment: Deployment, *, host_us: float | None = None) -> float:
        """Return a lower bound of its simulated time."""
        layout, costs = self._laid_out(deployment, host_us)
        return least_us(layout, costs, delayed=costs.split)
