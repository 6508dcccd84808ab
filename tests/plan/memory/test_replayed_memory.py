"""The replay of a slot's Program as allocations and frees."""

from __future__ import annotations

import pytest
from plan_graphs import chain, costs_for, transformer
from plan_instances import Instance, deploy
from thinned import one_in

from rannd.errors import DoesNotFitError, PlanError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, decode, encode
from rannd.plan.memory.replayed_memory import replayed
from rannd.plan.memory.slot_lives import SMALL
from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import RunMode
from rannd.plan.simulate.layout import piece_rows
from rannd.plan.slot_memory import slot_bytes

PARAM = 1_000_000


def _most(graph: TaskGraph, deployment: Deployment) -> int:
    """Planned bytes of the fullest device, replayed."""
    options = PlanOptions()
    blocks = make_blocks(Partitioning.of(graph), options, world=len(deployment.slots))
    found = replayed(graph, blocks, costs_for(len(blocks), activation=1000.0).blocks, deployment, options)
    assert decode(encode(found)) == found
    assert all(stage.estimate.most_bytes for stage in found.stages)
    return max(slot_bytes(found, slot) for slot in range(len(found.slots)))


def _chain(world: int, **items: object) -> int:
    graph = chain(4, param=PARAM, size=10.0)
    return _most(graph, deploy(graph, world, rows=4, activation=1000.0, **items))  # type: ignore[arg-type]


def test_all_gradients_lie_beside_those_that_the_script_has_kept() -> None:
    fixed = 4 * PARAM * (1 + 2 + 2)  # parameters, the optimizer's state, gradients of before and of this step
    assert fixed < _chain(1, pipeline_num=1) < 1.02 * fixed


def test_of_later_microbatches_one_gradient_waits_to_be_added() -> None:
    one, several = _chain(1, pipeline_num=1), _chain(1, pipeline_num=4)
    assert several - one == pytest.approx(PARAM, rel=0.05)


def test_a_bucket_is_a_copy_of_its_gradients() -> None:
    # The last gradient is in the first bucket, alone; the other three are there twice at the end.
    alone, shared = _chain(1, pipeline_num=1), _chain(2, pipeline_num=1, partition_num=1)
    assert shared - alone == pytest.approx(3 * PARAM, rel=0.05)


def test_more_microbatches_in_flight_keep_more() -> None:
    graph = transformer(4)
    given = {"rows": 64, "partition_num": 2, "pipeline_num": 8}
    pipelined, flushed = (_most(graph, deploy(graph, 2, schedule=each, **given)) for each in ("1f1b", "gpipe"))  # type: ignore[arg-type]
    assert pipelined < flushed


@pytest.mark.parametrize(
    "way", one_in(2, [RunMode("1f1b"), RunMode("gpipe"), RunMode("zb_h1"), RunMode("1f1b", 1)]), ids=str
)
def test_no_plan_needs_more_than_the_sums_of_the_search(way: RunMode) -> None:
    """The search keeps to its limit by these sums, which do not have a rank's own arguments and joined outputs."""
    tried = 0
    for seed in range(60):
        instance = Instance(seed, way=way)
        try:
            plan = instance.plan(10**12)
        except (DoesNotFitError, PlanError):
            continue
        found = replayed(instance.graph, instance.blocks, instance.costs.blocks, plan, instance.options)
        rows = piece_rows(plan.batch_rows, len(plan.slots), plan.microbatches)
        border = [value for value in instance.graph.values if value.producer < 0 or value.is_output]
        given = 3 * plan.microbatches * sum(value.bytes.at(rows) for value in border)
        for stage in found.stages:
            tried += 1
            assert 0 < stage.estimate.most_bytes <= (stage.estimate.total_bytes + given) * 1.01 + SMALL, seed
    assert tried > 30


def test_what_replicas_divide_is_not_replayed() -> None:
    graph = chain(4, param=PARAM)
    plan = deploy(graph, 2, zero_stage="2", partition_num=1)
    options = PlanOptions()
    blocks = make_blocks(Partitioning.of(graph), options, world=2)
    assert plan.zero == 2
    assert replayed(graph, blocks, costs_for(len(blocks)).blocks, plan, options) == plan
