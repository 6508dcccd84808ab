"""Memory of slots with several stages: the search's, the plan's and the simulator's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest
from plan_graphs import chain, costs_for, random_costs, random_graph, transformer

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot, decode, encode
from rannd.plan.plan_options import PlanOptions
from rannd.plan.schedule.in_flight import STEADY, flights
from rannd.plan.schedule.program import Layout
from rannd.plan.schedule.schedules import planned_program
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES
from rannd.plan.slot_memory import device_bytes, fullest_bytes, slot_bytes
from rannd.plan.virtual.slot_cuts import best_cuts, e_of_cuts
from rannd.plan.virtual.virtual_plans import VirtualPlans
from rannd.plan.virtual.virtual_shapes import Shape, has_passes
from rannd.profile.costs import CostTable

PLENTY = 10**15
KINDS = [(name, passes) for name in VIRTUAL_SCHEDULES for passes in (2, 3, 4) if has_passes(name, passes)]
KIB = 1024


def _plans(
    graph: TaskGraph, *, world: int = 2, memory: int = PLENTY, costs: CostTable | None = None, **items: object
) -> VirtualPlans:
    options = PlanOptions(**items)  # type: ignore[arg-type]
    blocks = make_blocks(Partitioning.of(graph), options, world=world)
    slots = tuple(Slot(0, device) for device in range(world))
    costs = costs or costs_for(len(blocks))
    return VirtualPlans(graph, blocks, costs, slots, batch_rows=8 * world, memory_bytes=memory, options=options)


def _random(seed: int, *, stages: int) -> VirtualPlans:
    """Of a random model with at least as many blocks as stages."""
    random = Random(seed)
    graph = random_graph(random, stages + random.randint(1, 4))
    blocks = make_blocks(Partitioning.of(graph), PlanOptions(min_partition_num=stages), world=2)
    return _plans(graph, costs=random_costs(random, len(blocks)), min_partition_num=stages)


def _made(plans: VirtualPlans, shape: Shape, starts: Sequence[int]) -> Deployment:
    parts, size = plans.fitted(shape, starts)
    found = plans.deployment(shape, parts)
    assert fullest_bytes(found) == size
    assert plans.least_bytes(shape) <= size
    return found


def _cuts(plans: VirtualPlans, shape: Shape) -> list[tuple[int, ...]]:
    return [(0, *cuts) for cuts in combinations(range(1, len(plans.blocks)), shape.stages - 1)]


@pytest.mark.parametrize(("schedule", "passes"), KINDS)
@pytest.mark.parametrize("positions", [2, 3, 4])
def test_more_microbatches_keep_no_more(schedule: str, passes: int, positions: int) -> None:
    homes = Shape(schedule, passes, positions, 1, 1, "stages").homes
    for split in (frozenset[int](), frozenset(range(len(homes)))):
        few, many = (
            flights(schedule, Layout(positions, count, tuple((home,) for home in homes), (), ()), split)
            for count in (STEADY, 3 * STEADY)
        )
        assert few == many
        program = planned_program(schedule, Layout(positions, 3 * STEADY, tuple((at,) for at in homes), (), ()), split)
        assert max(first for first, _ in few.most) <= len(program.layout.pieces(0, homes[0]))
        assert all(first <= most for first, most in few.most)


@pytest.mark.parametrize(("schedule", "passes"), [each for each in KINDS if each[1] == 2])
def test_planned_memory_is_the_simulators(schedule: str, passes: int) -> None:
    for graph in (chain(12, param=100_000), transformer(6)):
        plans = _plans(graph, world=8)
        for zero in (0, *VIRTUAL_SCHEDULES[schedule].zero):
            shape = Shape(schedule, passes, 4, 2, 4, "stages", zero)
            cuts = plans.cuts(shape, PLENTY)
            assert cuts is not None
            found = _made(plans, shape, cuts.starts)
            assert decode(encode(found)) == found
            peaks, planned = plans.simulated(found, memory=True).peak_bytes, device_bytes(found)
            for slots, size in planned.items():
                for slot in slots:
                    assert peaks[slot] <= size + KIB
                    assert size <= 1.06 * peaks[slot] + KIB
                    assert slot_bytes(found, slot) == size


@pytest.mark.parametrize(("schedule", "passes"), KINDS)
def test_the_best_of_all_cuts_that_fit_is_found(schedule: str, passes: int) -> None:
    """Against every cut, with its memory as the deployment states it."""
    tried = 0
    for seed in range(12):
        plans = _random(seed, stages=2 * passes)
        for zero in (0, 1) if passes == 2 else (0,):
            shape = Shape(schedule, passes, 2, 1, 2, "stages", zero)
            every = {starts: _made(plans, shape, starts) for starts in _cuts(plans, shape)}
            costs = plans.costs_of(shape, PLENTY)
            for part in (1.0, 0.5, 0.1):
                sizes = {starts: e_of_cuts(costs, starts)[1] for starts in every}
                limit = (
                    sorted(sizes.values())[int((len(sizes) - 1) * part)] + 16 * passes + plans.table(shape).memory.late
                )
                fitting = [starts for starts, size in sizes.items() if size <= costs.limit - PLENTY + limit]
                found = best_cuts(plans.costs_of(shape, limit))
                assert found is not None
                assert found.e_us == pytest.approx(min(e_of_cuts(costs, starts)[0] for starts in fitting))
                assert fullest_bytes(every[found.starts]) <= limit
                tried += 1
            for starts, deployment in every.items():
                # Shared parameters of stages of one slot count once in the deployment, in cuts twice.
                alike = sum(plans.graph.params[read].bytes for read in range(len(plans.graph.params)))
                size = e_of_cuts(costs, starts)[1] + plans.table(shape).memory.late
                assert size - 10 * alike <= fullest_bytes(deployment) <= size + 16 * passes
    assert tried > 30


def test_what_does_not_fit_recomputes_as_little_as_does() -> None:
    graph = chain(12, param=1000)
    shape = Shape("interleaved_1f1b", 2, 2, 1, 4, "stages")
    costs = costs_for(12, activation=20_000)
    ample = _plans(graph, costs=costs)
    cuts = ample.cuts(shape, PLENTY)
    assert cuts is not None
    whole = _made(ample, shape, cuts.starts)
    assert not any(stage.recompute for stage in whole.stages)
    steps, least = [ample.simulated(whole).step_us], fullest_bytes(whole)
    for part in (0.95, 0.8, 0.6):
        memory = int(fullest_bytes(whole) * part)
        tight = _plans(graph, memory=memory, costs=costs)
        found = _made(tight, shape, cuts.starts)
        assert fullest_bytes(found) <= memory
        assert any(stage.recompute for stage in found.stages)
        steps.append(tight.simulated(found).step_us)
        least = fullest_bytes(found)
    assert steps == sorted(steps), "less memory takes more time"
    asked = _made(_plans(graph, costs=costs, checkpointing=True), shape, cuts.starts)
    assert all(stage.recompute for stage in asked.stages)
    assert fullest_bytes(asked) <= least
    but_last = _made(_plans(graph, costs=costs, checkpointing=True, checkpointing_no_last=True), shape, cuts.starts)
    assert [stage.recompute for stage in but_last.stages] == [True, True, True, False]
    least = _made(_plans(graph, costs=costs, memory=1), shape, cuts.starts)
    assert fullest_bytes(least) == fullest_bytes(asked)


def test_a_slot_that_does_not_fit_delays_nothing_before_it_recomputes() -> None:
    graph = chain(12, param=1000)
    shape = Shape("zb_v", 2, 2, 1, 4, "stages")
    plans = _random_chain(graph)
    cuts = plans.cuts(shape, PLENTY)
    assert cuts is not None
    whole = _made(plans, shape, cuts.starts)
    assert all(stage.estimate.weight_us > 0 for stage in whole.stages)
    tight = _made(_random_chain(graph, memory=fullest_bytes(whole) - 1), shape, cuts.starts)
    assert fullest_bytes(tight) < fullest_bytes(whole)
    assert any(stage.estimate.weight_us == 0 for stage in tight.stages)


def _random_chain(graph: TaskGraph, memory: int = PLENTY) -> VirtualPlans:
    blocks = make_blocks(Partitioning.of(graph), PlanOptions(), world=2)
    return _plans(graph, memory=memory, costs=random_costs(Random(3), len(blocks)))
