"""What steps tell of the time that reductions of gradients take."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from plan_graphs import GraphBuilder
from plan_instances import deploy

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.deployment import Deployment, Slot
from rannd.plan.measured_step import MEASURED_FORMAT, MeasuredStep, RankTimes
from rannd.plan.plan_options import PlanOptions
from rannd.plan.simulate.layout import layout_and_costs, loss_layout
from rannd.plan.simulate.simulator import predict
from rannd.plan.simulate.step_costs import FIRST_BUCKET
from rannd.profile.costs import LinkCost, RuntimeCost
from rannd.runtime.costs.measured_reductions import reductions_took

LINK = LinkCost(10.0, 1000.0, 50.0, 2000.0)
FAR = LinkCost(40.0, 100.0, 200.0, 400.0)
PARAMS = 8 * 10**6


def layers(params: int = PARAMS) -> TaskGraph:
    builder = GraphBuilder()
    value = builder.input()
    for layer in range(8):
        value = builder.op([value], params=[builder.param(params // 8)], flops=100_000, output=layer == 7)
    return builder.build()


def steps(deployment: Deployment, *links: LinkCost, options: PlanOptions) -> MeasuredStep:
    """Steps on links that take something else."""
    runtime = RuntimeCost(0.0, deployment.call_us, deployment.host_us)
    overlap = not options.sync_allreduce
    layout, costs = layout_and_costs(layers(), deployment, *links, overlap=overlap, options=options, runtime=runtime)
    played = predict(deployment.schedule, loss_layout(layout), costs, memory=False)
    ranks = [
        # Rank 0 came early, and waits for that, too.
        RankTimes(slot, 20, (), (), played.step_us, 0, 0, 0, 0, 0, 0, reduced_us=us + 500.0 * (not slot))
        for slot, us in enumerate(played.drain_us)
    ]
    return MeasuredStep(MEASURED_FORMAT, tuple(ranks))


def scaled(link: LinkCost, factor: float) -> LinkCost:
    return msgspec.structs.replace(
        link,
        allreduce_latency_us=factor * link.allreduce_latency_us,
        allreduce_bytes_per_us=link.allreduce_bytes_per_us / factor,
    )


def one_stage(world: int, **items: object) -> Deployment:
    return deploy(layers(), world, partition_num=1, **items)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("world", [2, 4])
def test_reductions_take_what_ranks_wait_for_them(world: int, factor: float) -> None:
    deployment, options = one_stage(world, pipeline_num=2), PlanOptions()
    measured = steps(deployment, scaled(LINK, factor), options=options)
    (took,) = reductions_took(layers(), deployment, measured, (LINK, None), options)
    buckets = 2  # the first one is small
    assert FIRST_BUCKET < PARAMS
    assert (took.between, took.rounds) == (False, buckets * (world - 1))
    assert took.nbytes == pytest.approx(2 * (world - 1) / world * PARAMS)
    alone = took.rounds * LINK.allreduce_latency_us + took.nbytes / LINK.allreduce_bytes_per_us
    assert took.us == pytest.approx(factor * alone, rel=0.02)


def test_all_at_once_takes_one_round() -> None:
    options = PlanOptions(sync_allreduce=True)
    deployment = one_stage(2, sync_allreduce=True)
    measured = steps(deployment, scaled(LINK, 1.5), options=options)
    (took,) = reductions_took(layers(), deployment, measured, (LINK, None), options)
    assert (took.rounds, took.us) == (1, pytest.approx(1.5 * LINK.allreduce_us(PARAMS, 2)))


def test_processors_that_copy_what_is_reduced() -> None:
    link = msgspec.structs.replace(LINK, allreduce_host_us=1 / LINK.allreduce_bytes_per_us)
    slower = msgspec.structs.replace(scaled(link, 1.5), allreduce_host_us=1.5 / LINK.allreduce_bytes_per_us)
    deployment, options = one_stage(2), PlanOptions()
    (took,) = reductions_took(layers(), deployment, steps(deployment, slower, options=options), (link, None), options)
    assert took.us == pytest.approx(1.5 * (2 * 50.0 + PARAMS / 2000.0), rel=0.02)


def between(deployment: Deployment, nodes: Callable[[int], int]) -> Deployment:
    slots = tuple(Slot(nodes(number), 0) for number in range(len(deployment.slots)))
    return msgspec.structs.replace(deployment, slots=slots)


def test_links_between_nodes_are_learned_by_themselves() -> None:
    options = PlanOptions()
    far = between(one_stage(2), lambda number: number)
    measured = steps(far, LINK, scaled(FAR, 2.0), options=options)
    (took,) = reductions_took(layers(), far, measured, (LINK, FAR), options)
    assert took.between
    assert took.us == pytest.approx(2 * (2 * 200.0 + PARAMS / 400.0), rel=0.02)


def test_each_group_of_replicas_says_something() -> None:
    options = PlanOptions()
    deployment = deploy(layers(), 4, partition_num=2, pipeline_num=4)
    assert [len(stage.slots) for stage in deployment.stages] == [2, 2]
    measured = steps(deployment, scaled(LINK, 1.5), options=options)
    found = reductions_took(layers(), deployment, measured, (LINK, None), options)
    assert sum(each.nbytes for each in found) == PARAMS
    for each in found:
        alone = each.rounds * LINK.allreduce_latency_us + each.nbytes / LINK.allreduce_bytes_per_us
        assert each.us == pytest.approx(1.5 * alone, rel=0.02)


def test_nothing_is_said_of_what_nobody_waits_for() -> None:
    options, large = PlanOptions(), layers(400 << 20)
    deployment = deploy(large, 2, partition_num=1)
    hidden = MeasuredStep(
        MEASURED_FORMAT,
        tuple(RankTimes(slot, 20, (), (), 1e6, 0, 0, 0, 9e5, 50.0, 0, reduced_us=50.0) for slot in range(2)),
    )
    quick = LinkCost(10.0, 1000.0, 1.0, 40_000.0)
    assert reductions_took(large, deployment, hidden, (quick, None), options) == []
    (found,) = reductions_took(large, deployment, hidden, (LINK, None), options)
    assert found.us < 0.5 * LINK.allreduce_us(400 << 20, 2), "they cannot take as long as the link says"


def test_nothing_is_said_of_stages_without_replicas_and_of_what_replicas_share() -> None:
    options = PlanOptions()
    alone = deploy(layers(), 2, partition_num=2)
    assert reductions_took(layers(), alone, steps(alone, LINK, options=options), (LINK, None), options) == []
    replicas = one_stage(2)
    measured, divided = steps(replicas, LINK, options=options), msgspec.structs.replace(replicas, zero=1)
    assert reductions_took(layers(), divided, measured, (LINK, None), options) == []
