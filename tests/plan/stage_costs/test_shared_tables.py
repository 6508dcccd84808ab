"""What tables of a search have in common, against what it says of each place."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from plan_graphs import random_costs, random_graph

from rannd.plan.blocks.blocks import Block
from rannd.plan.deployment import Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.stage_costs.intervals import Intervals
from rannd.plan.stage_costs.shared_tables import RowTables, SharedTables
from rannd.plan.topology import Machine
from rannd.profile.costs import LinkCost


def _slots(random: Random, world: int) -> list[Slot]:
    nodes = sorted(random.randrange(3) for _ in range(world))
    return [Slot(node, place) for place, node in enumerate(nodes)]


def _shared(random: Random, between: LinkCost | None) -> SharedTables:
    """Tables of a random model of five blocks on nine devices."""
    graph, costs = random_graph(random, 5), random_costs(random, 5)
    intervals = Intervals(graph, [Block((at,)) for at in range(5)], costs.blocks)
    return SharedTables(intervals, Machine(_slots(random, 9), LinkCost(1, 1000, 1, 1000), between))


@pytest.mark.parametrize("seed", range(40))
def test_pipelines_inside_nodes_are_those_whose_slots_are_on_one(seed: int) -> None:
    random = Random(seed)
    world = random.randint(1, 13)
    slots = _slots(random, world)
    machine = Machine(slots, LinkCost(1, 1000, 1, 1000), LinkCost(2, 10, 2, 10))
    replicas = np.array(sorted(random.sample(range(1, world + 1), random.randint(1, world))))
    for count, found in zip(replicas, machine.pipelines_inside(replicas), strict=True):
        parts = [range(part * world // count, -(-(part + 1) * world // count)) for part in range(count)]
        assert found == all(len({slots[slot].node for slot in part}) == 1 for part in parts)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("seed", range(10))
def test_no_bound_of_reductions_falls_with_the_number_of_replicas(seed: int, zero: int) -> None:
    """Bounds of the search take the smallest number that a stage may have."""
    copying = (0.3, 0.8) if seed % 2 else ()
    shared = _shared(Random(seed), LinkCost(20, 1, 20, 1, *copying))
    reductions, (starts, ends, _) = shared.reductions, shared.intervals.runs
    replicas = np.arange(1, 10)
    least, gather = reductions.least(replicas, zero)
    bounds = (*least, gather)
    for table in bounds:
        assert (np.diff(table, axis=1) >= 0).all()
    for end in range(1, 6):
        for inside in (None, np.arange(9) % 2 == 0):
            found = (*reductions.of(end, replicas, inside, zero), reductions.gather(end, replicas, inside))
            for table, bound in zip(found, bounds, strict=True):
                assert (bound[ends == end] <= table[starts[ends == end]]).all()


@pytest.mark.parametrize("seed", range(5))
def test_tables_of_several_numbers_of_rows_are_those_of_each(seed: int) -> None:
    shared = _shared(Random(seed), LinkCost(20, 1, 20, 1))
    together, numbers = RowTables(shared.intervals, shared.machine, np.array([7, 2])[:, None, None]), (7, 2)
    alone = [RowTables(shared.intervals, shared.machine, rows) for rows in numbers]
    for name in ("kept", "kept_apart", "kept_divided", "handed_apart", "nearest_us", "weight_us", "delayed"):
        for tables in (together, *alone):
            getattr(tables, name)  # they are made when they are asked for
    for place, tables in enumerate(alone):
        found = together.one(place)
        assert vars(found).keys() == vars(tables).keys()
        for name, value in vars(tables).items():
            if name != "_intervals":
                np.testing.assert_array_equal(np.array(getattr(found, name)), np.array(value), name)


@pytest.mark.parametrize("offload", ["true", "false"])
@pytest.mark.parametrize("seed", range(10))
def test_no_stage_needs_more_training_state_with_more_replicas(seed: int, offload: str) -> None:
    """Whether memory is tight is told by the smallest number."""
    shared = _shared(Random(seed), None)
    for zero in (0, 1):
        state = shared.state(zero, np.arange(1, 10), PlanOptions(offload_optimizer=offload))
        assert (np.diff(state.fixed, axis=2) <= 0).all()
