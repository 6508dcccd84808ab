"""Plans of equal pipelines, with one or several stages per slot: cut, placed, fitted into memory and simulated.

All schedules go the same way, those that run today, too: the model is cut by the planner's search for the number of
stages, on a machine that has a slot for every stage of every slot (each of them then takes as long as the longest
stage, so E is about the time of the interleaved pipeline); for comparison also into stages with equally many operators.
A slot that does not fit recomputes, with the planner's own division of stages, as little as the simulated peak allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import msgspec
import numpy as np

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.blocks.cut_places import cut_places
from rannd.plan.deployment import FORMAT, Deployment, Slot, Stage
from rannd.plan.plan_options import PlanOptions
from rannd.plan.schedule.program import NOWHERE, ActionKind, Layout, Program
from rannd.plan.schedule.schedules import ALL_SCHEDULES, planned_program
from rannd.plan.schedule.virtual_stages import Slots, interleaved_1f1b, round_robin, v_shape, zero_bubble_v
from rannd.plan.search.candidates import even_starts
from rannd.plan.search.estimate import StageTables, Variant
from rannd.plan.search.intervals import Intervals
from rannd.plan.search.planner import microbatch_counts
from rannd.plan.search.recompute import least_memory, segments
from rannd.plan.search.reduction_times import Reductions
from rannd.plan.search.stages import best_choice
from rannd.plan.simulate.layout import layout_of, loss_layout, piece_rows, step_costs
from rannd.plan.simulate.repeats import repeats
from rannd.plan.simulate.simulator import Simulation, predict_order
from rannd.plan.simulate.step_costs import StepCosts
from rannd.plan.topology import Machine, Table, place
from rannd.profile.costs import CostTable

EFFORT = 20_000
"""Effort of the search for cuts, as for the planner's own candidates."""
TRIES = 6
"""Simulations to find how much a plan has to recompute."""


@dataclass(frozen=True)
class Kind:
    """A schedule to price."""

    name: str
    passes: int
    """Stages per slot."""
    placed: Callable[[Slots], Slots]
    """Slots of each stage, from those of each position."""
    program: Callable[[Layout, frozenset[int]], Program]
    """From layout and stages whose backward is split."""
    splits: bool = False

    @property
    def costs_of(self) -> str:
        """The schedule of today's whose costs it has."""
        return "zb_h1" if self.splits else "1f1b"

    @property
    def zeros(self) -> tuple[int, ...]:
        """ZeRO stages with which it can be planned: 2 and 3 shard gradients as soon as they are computed."""
        return (0, 1) if self.splits else (0, 1, 2, 3)


def _interleaved(passes: int, ahead: int) -> Kind:
    return Kind(
        f"interleaved, v = {passes}",
        passes,
        lambda positions: round_robin(positions, passes),
        lambda layout, split: interleaved_1f1b(layout, ahead=ahead),
    )


TODAY = (
    Kind("1F1B", 1, lambda positions: positions, lambda layout, split: planned_program("1f1b", layout)),
    Kind("zb_h1", 1, lambda positions: positions, lambda layout, split: planned_program("zb_h1", layout, split), True),
)
INTERLEAVED = (
    *(_interleaved(passes, ahead) for passes in (2, 4) for ahead in (0, 1, 2)),
    Kind("ZB-V", 2, v_shape, zero_bubble_v, True),
)


@lru_cache(maxsize=64)
def _program(kind: Kind, layout: Layout, split: frozenset[int]) -> Program:
    return kind.program(layout, split)


@dataclass(frozen=True)
class Priced:
    """A plan and its simulated step."""

    kind: Kind
    deployment: Deployment
    simulated: Simulation
    costs: StepCosts
    uneven: float
    """Computing time of the slot that has most of it, relative to the mean."""

    @property
    def step_us(self) -> float:
        return self.simulated.step_us

    @property
    def most_bytes(self) -> int:
        return max(self.simulated.peak_bytes)

    @property
    def name(self) -> str:
        """Such as '4 x 8, m 8, ZeRO 1, recompute': positions, replicas, microbatches per rank."""
        stages = self.deployment.stages
        again = any(stage.recompute for stage in stages)
        parts = [
            f"{len(stages) // self.kind.passes} x {len(stages[0].slots)}",
            f"m {self.deployment.microbatches}",
            f"ZeRO {self.deployment.zero}" if self.deployment.zero else "",
            "recompute" if again else "",
        ]
        return ", ".join(filter(None, parts))


@dataclass
class Workshop:
    """One model on some devices: what all plans for it share."""

    graph: TaskGraph
    blocks: tuple[Block, ...]
    costs: CostTable
    slots: tuple[Slot, ...]
    rows: int
    """Rows of a rank's mini-batch."""
    memory: int
    """Bytes of a device that a plan may use."""
    options: PlanOptions
    host_us: float
    """Time of each action, beside what it computes or sends."""
    halves: float = 1.0
    """What the two halves of a backward take together, relative to the whole."""
    _machines: dict[int, tuple[Machine, Reductions]] = field(default_factory=dict)
    _cuts: dict[tuple[object, ...], list[tuple[int, ...]]] = field(default_factory=dict)
    _tables: dict[Variant, StageTables] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return len(self.slots)

    @cached_property
    def intervals(self) -> Intervals:
        return Intervals(self.graph, self.blocks, self.costs.blocks, self.options)

    @cached_property
    def microbatches(self) -> list[int]:
        return microbatch_counts(self.options, rows_per_rank=self.rows, coupled=self.graph.rows_coupled)

    # -- simulation -------------------------------------------------------------------------------------------

    def step_costs(self, deployment: Deployment) -> StepCosts:
        """Costs of a deployment's actions, with the host's time; what stages of one slot share is held once."""
        found = step_costs(self.graph, deployment, self.costs.link, self.costs.between, options=self.options)
        state = list(found.state_bytes)
        for stage, more in self._held_twice(deployment).items():
            state[stage] -= more
        found = msgspec.structs.replace(found, host_us=self.host_us, state_bytes=tuple(state))
        if not ALL_SCHEDULES[deployment.schedule].delays_weights:
            return found
        longer = [self.halves if us > 0 else 1.0 for us in found.weight_us]
        return msgspec.structs.replace(
            found,
            backward_us=tuple(us * more for us, more in zip(found.backward_us, longer, strict=True)),
            weight_us=tuple(us * more for us, more in zip(found.weight_us, longer, strict=True)),
        )

    def simulated(self, deployment: Deployment) -> Simulation:
        """Simulate a deployment of the planner's."""
        costs = self.step_costs(deployment)
        layout = loss_layout(layout_of(self.graph, deployment))
        return predict_order(lambda part: planned_program(deployment.schedule, part, costs.split), layout, costs)

    def _held_twice(self, deployment: Deployment) -> dict[int, int]:
        """Bytes of parameters, gradients and optimizer state that an earlier stage of the same slots has, by stage."""
        found: dict[int, int] = {}
        reads = {op.name: op.params for op in self.graph.ops}
        seen: dict[tuple[int, ...], set[int]] = {}
        weight = 3 + self.options.opt_param_factor
        """Value, gradient, that of a delayed step, optimizer state; tied parameters are whole under ZeRO, too, but for
        the optimizer's state, which the estimate does not divide either."""
        for number, stage in enumerate(deployment.stages):
            own = {index for name in stage.ops for index in reads[name]}
            before = seen.setdefault(stage.slots, set())
            found[number] = sum(
                int(self.graph.params[index].bytes * (weight if self.graph.params[index].trainable else 1))
                for index in own & before
            )
            before |= own
        return found

    # -- plans ------------------------------------------------------------------------------------------------

    def best(self, kind: Kind, below: float = math.inf) -> Priced | None:
        """Return the fastest plan of `kind` that fits, if it takes less than `below` microseconds."""
        best: Priced | None = None
        open_ = sorted(self._open(kind), key=lambda each: each[0])
        for least, drafted in open_:
            limit = min(below, best.step_us if best is not None else math.inf)
            if least >= limit:
                break
            found = self._fit(kind, drafted, limit)
            if found is not None and found.step_us < limit:
                best = found
        return best

    def _open(self, kind: Kind) -> Iterator[tuple[float, _Draft]]:
        """Yield all plans, with a lower bound of their step: the computing time of the busiest slot."""
        sizes = [len(block.ops) for block in self.blocks]
        for count in range(2, self.world + 1):
            stages, replicas = count * kind.passes, self.world // count
            if self.world % count or stages > len(self.blocks):
                continue
            for microbatches in self.microbatches:
                for placement in self._machine(1)[0].placements:
                    cuts = self._cut(kind, stages, replicas, microbatches, placement)
                    for zero in kind.zeros if replicas > 1 else (0,):
                        for starts in dict.fromkeys([*cuts, even_starts(sizes, stages)]):
                            if starts:
                                drafted = _Draft(
                                    starts, replicas, Variant(kind.costs_of, microbatches, placement, zero)
                                )
                                yield self._busiest_us(kind, drafted), drafted

    def _busiest_us(self, kind: Kind, drafted: _Draft) -> float:
        table = self.table(drafted.variant)
        per_stage = np.array(
            [table.forward_us[a, b] + table.backward_us[a, b] for a, b in drafted.spans(len(self.blocks))]
        )
        return float(self._by_position(kind, per_stage).max()) * int(table.pieces[drafted.replicas - 1])

    @staticmethod
    def _by_position(kind: Kind, per_stage: Table) -> Table:
        """Add up what the stages of each position take."""
        return np.bincount(_positions(kind, len(per_stage)), weights=per_stage)

    def _machine(self, passes: int) -> tuple[Machine, Reductions]:
        if passes not in self._machines:
            slots = [Slot(each.node, each.device * passes + turn) for each in self.slots for turn in range(passes)]
            machine = Machine(slots, self.costs.link, self.costs.between)
            self._machines[passes] = machine, Reductions(self.intervals, machine)
        return self._machines[passes]

    def _cut(self, kind: Kind, stages: int, replicas: int, microbatches: int, placement: str) -> list[tuple[int, ...]]:
        """The first blocks of stages, by the planner's search with ample memory."""
        key = (kind.costs_of, kind.passes, stages, replicas, microbatches, placement)
        if key not in self._cuts:
            machine, reductions = self._machine(kind.passes)
            places = np.array(cut_places(self.graph, [block.ops for block in self.blocks]))
            only = np.arange(1, machine.world + 1) == replicas
            table = StageTables(
                self.intervals,
                machine,
                self.options,
                Variant(kind.costs_of, microbatches, placement),
                rows=piece_rows(self.rows * self.world, self.world, microbatches),
                limit=math.inf,
                allowed=(places[:, None] & places[None, :])[:, :, None] & only,
                reductions=reductions,
            )
            choice = best_choice([table], stages=stages, effort=EFFORT).choice
            self._cuts[key] = [choice.starts] if choice is not None else []
        return self._cuts[key]

    def table(self, variant: Variant) -> StageTables:
        """Costs of all runs of blocks on the real devices, with ample memory."""
        if variant not in self._tables:
            machine, reductions = self._machine(1)
            count = len(self.blocks) + 1
            self._tables[variant] = StageTables(
                self.intervals,
                machine,
                self.options,
                variant,
                rows=piece_rows(self.rows * self.world, self.world, variant.microbatches),
                limit=math.inf,
                allowed=np.ones((count, count, self.world), dtype=bool),
                reductions=reductions,
            )
        return self._tables[variant]

    def _fit(self, kind: Kind, drafted: _Draft, limit: float) -> Priced | None:
        """Simulate a plan; if it does not fit, recompute as little as does. None if that is not enough."""
        whole = self._price(kind, drafted)
        if whole.most_bytes <= self.memory:
            return whole
        if whole.step_us >= limit:
            return None
        table = self.table(drafted.variant)
        flying = self._flying(kind, whole)
        needs = flying * np.array([table.kept[start, end] for start, end in drafted.spans(len(self.blocks))])
        together = self._by_position(kind, needs)[_positions(kind, len(needs))]
        peaks = np.array(
            [max(whole.simulated.peak_bytes[slot] for slot in stage.slots) for stage in whole.deployment.stages],
            dtype=float,
        )
        best: Priced | None = None
        share, low, high = 1.0, 0.0, 1.0
        for _ in range(TRIES):
            # What a slot may keep of activations, divided as its stages need it.
            room = np.maximum(self.memory - (peaks - together), 0.0) * share
            budgets = np.where(peaks <= self.memory, np.inf, needs / np.maximum(together, 1.0) * room)
            found = self._price(kind, drafted, budgets, flying)
            if found.most_bytes <= self.memory:
                best = found if best is None or found.step_us < best.step_us else best
                if share == 1.0:
                    break
                low = share
            else:
                high = share
            share = (low + high) / 2
        return best

    def _flying(self, kind: Kind, found: Priced) -> Table:
        """Most microbatches of a stage between forward and backward (its second half, if it is split), by stage."""
        block = repeats(loss_layout(layout_of(self.graph, found.deployment)), ())[0].block
        program = _program(kind, block, found.costs.split)
        most = np.ones(len(block.stages))
        for stage, slots in enumerate(block.stages):
            kinds = [each.kind for each in program.slots[slots[0]] if each.stage in (stage, NOWHERE)]
            ends = ActionKind.WEIGHT if ActionKind.WEIGHT in kinds else ActionKind.BACKWARD
            flying = np.cumsum([(each is ActionKind.FORWARD) - (each is ends) for each in kinds])
            most[stage] = max(1, flying.max())
        return most

    def _price(self, kind: Kind, drafted: _Draft, budgets: Table | None = None, flying: Table | None = None) -> Priced:
        """Simulate a plan whose stages keep activations of at most `budgets` bytes, with `flying` microbatches each."""
        variant, replicas = drafted.variant, drafted.replicas
        table = self.table(variant)
        positions = place((replicas,) * (len(drafted.starts) // kind.passes), variant.placement)
        pieces = int(table.pieces[replicas - 1])
        stages = []
        for number, ((start, end), slots) in enumerate(
            zip(drafted.spans(len(self.blocks)), kind.placed(positions), strict=True)
        ):
            estimate = table.estimate(start, end, replicas, used=0)
            delayed = int(table.delayed[start, end]) if kind.splits and table.weight_us[start, end] > 0 else 0
            estimate = msgspec.structs.replace(
                estimate, in_flight=1, activation_bytes=math.ceil(table.kept[start, end]), weight_bytes=delayed
            )
            again = False
            if budgets is not None and flying is not None and np.isfinite(budgets[number]):
                forward = np.diagonal(table.forward_us, 1)[start:end]
                activation = table.kept[start : end + 1, start : end + 1]
                handed = self.intervals.handed(start, end, table.rows)
                apart = variant.zero >= 2 and replicas > 1
                count = int(flying[number])
                divided = segments(forward, activation, handed, count, float(budgets[number]), apart=apart)
                divided = divided or least_memory(forward, activation, handed, count, apart=apart)
                again = any(divided.again)
                if again:
                    estimate = msgspec.structs.replace(
                        estimate,
                        activation_bytes=math.ceil(divided.kept),
                        weight_bytes=0,
                        weight_us=0.0,
                        backward_us=estimate.backward_us + divided.forward_us * pieces,
                        working_bytes=estimate.working_bytes + math.ceil(divided.working),
                    )
            names = tuple(self.graph.ops[op].name for block in self.blocks[start:end] for op in block.ops)
            stages.append(Stage(f"MERGE_{start}_{end - 1}", names, slots, again, estimate))
        deployment = Deployment(
            format=FORMAT,
            graph_hash=self.graph.graph_hash,
            slots=self.slots,
            stages=tuple(stages),
            microbatches=variant.microbatches,
            schedule=kind.costs_of,
            batch_rows=self.rows * self.world,
            step_us=0.0,
            placement=variant.placement,
            zero=variant.zero,
        )
        costs = self.step_costs(deployment)
        layout = loss_layout(layout_of(self.graph, deployment))
        simulated = predict_order(lambda part: _program(kind, part, costs.split), layout, costs)
        computing = self._by_position(kind, np.array(costs.forward_us) + np.array(costs.backward_us))
        return Priced(kind, deployment, simulated, costs, float(computing.max() / computing.mean()))


def _positions(kind: Kind, stages: int) -> list[int]:
    """Position of each stage."""
    count = stages // kind.passes
    return [position for (position,) in kind.placed(tuple((position,) for position in range(count)))]


@dataclass(frozen=True)
class _Draft:
    """Cuts, replicas and variant of a plan."""

    starts: tuple[int, ...]
    replicas: int
    variant: Variant

    def spans(self, blocks: int) -> list[tuple[int, int]]:
        """(first block, end) of each stage."""
        return list(zip(self.starts, (*self.starts[1:], blocks), strict=True))
