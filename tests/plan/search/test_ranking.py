"""Plans that the ranking does not simulate could not have won: everything simulated chooses the same plan."""

from __future__ import annotations

import math

import pytest
from plan_graphs import chain
from plan_instances import PLENTY, Instance, deploy

from rannd.errors import DoesNotFitError
from rannd.graph.fx.ir import Size
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot
from rannd.plan.plan_lines import alternative_lines
from rannd.plan.plan_options import PlanOptions
from rannd.plan.plan_text import show
from rannd.plan.search import ranking
from rannd.plan.search.candidates import EvenSplit
from rannd.plan.search.planner import plan
from rannd.plan.search.ranking import rank, simulated_us
from rannd.plan.search.stages import e_of
from rannd.profile.costs import BlockCost, CostTable, LinkCost


def ranked(instance: Instance, memory: int) -> Deployment:
    instance.way = None
    return instance.plan(memory, ranked=True)


@pytest.mark.long
def test_what_is_not_simulated_would_not_have_won(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = seen = 0
    for seed in range(40):
        instance = Instance(seed, world=8, ops=9)
        limits = [PLENTY]
        try:
            ranked(instance, 1)
        except DoesNotFitError as exc:
            limits += [math.ceil(exc.needed * 1.02), math.ceil(exc.needed * 1.5)]
        for limit in limits:
            found = ranked(instance, limit)
            with monkeypatch.context() as patch:
                patch.setattr(ranking, "least_us", lambda *given, **items: 0.0)
                whole = ranked(instance, limit)
            assert not any(other.at_least for other in whole.alternatives)
            assert (found.stages, found.schedule, found.zero) == (whole.stages, whole.schedule, whole.zero), seed
            assert (found.step_us, found.e_us, found.microbatches) == (whole.step_us, whole.e_us, whole.microbatches)
            left_out += sum(other.at_least for other in found.alternatives)
            took = {other.name: other.step_us for other in whole.alternatives if not other.over_bytes}
            for other in found.alternatives:
                names = [each.name for each in (*found.alternatives, *whole.alternatives)]
                if other.name in took and names.count(other.name) == 2:  # (1, 3) and (3, 1) replicas have one name
                    seen += 1
                    exact = took[other.name]
                    assert other.step_us <= exact if other.at_least else other.step_us == exact, seed
    assert left_out > 50
    assert seen > 50


def test_e_of_an_even_split_is_at_least_what_it_waits_for_its_turn_with() -> None:
    tried = 0
    given: list[list[object]] = []

    def noted(plans: list[object], *others: object) -> object:
        given.append(plans)
        return rank(plans, *others)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rannd.plan.search.planner.rank", noted)
        for seed in range(40):
            ranked(Instance(seed, world=8, ops=9), PLENTY)
    for plans in given:
        for each in plans:
            if isinstance(each, EvenSplit):
                choice = e_of(each.table, each.starts, each.replicas)
                if choice is not None:
                    tried += 1
                    assert each.least_us <= choice.preference_us
    assert tried > 100


def test_what_cannot_win_is_told_as_such() -> None:
    found = deploy(chain(8, param=100_000), 4, ranked=True)
    assert found.alternatives
    assert all(other.at_least for other in found.alternatives)
    assert all(": at least " in line for line in alternative_lines(found))
    lines = show(found).splitlines()
    for other in found.alternatives:
        assert any(line.startswith(other.name) and " at least " in line for line in lines), other.name


def test_a_cut_moves_where_the_simulator_prefers_it() -> None:
    """The slowest stage is best the first one: nothing waits for it at the begin and at the end. E does not know."""
    times = [2.0, 11.0, 8.0, 6.0, 4.0, 4.0, 8.0, 11.0, 8.0, 3.0, 8.0, 5.0]
    graph, link = chain(len(times)), LinkCost(0.0, 1e12, 0.0, 1e12)
    costs = CostTable(tuple(BlockCost(Size(us), Size(2 * us), Size(0, 100)) for us in times), link)

    def found(memory: int, *, ranked: bool) -> Deployment:
        return plan(
            graph, make_blocks(Partitioning.of(graph), PlanOptions(), world=2), costs,
            world=2, slots=(Slot(0, 0), Slot(0, 1)), batch_rows=16, memory_bytes=memory, ranked=ranked,
            options=PlanOptions(pipeline_num=4, partition_num=2, schedule="1f1b"),
        )  # fmt: skip

    by_e, moved = (found(PLENTY, ranked=ranked) for ranked in (False, True))
    assert [[len(stage.ops) for stage in each.stages] for each in (by_e, moved)] == [[6, 6], [7, 5]]
    # Stage 0 has 8 microbatches of 43 + 86, stage 1 of 43 and 86 less; after its last one, stage 0 has one backward.
    own, other = (3 * sum(part) for part in (times[:7], times[7:]))
    assert moved.step_us == pytest.approx(8 * own + max(other - own / 3, 0) - own / 3, rel=0.02)
    assert moved.step_us < 0.95 * simulated_us(graph, costs, by_e, PlanOptions())
    needed = max(stage.estimate.total_bytes for stage in moved.stages)
    assert max(stage.estimate.total_bytes for stage in by_e.stages) < needed, "so that there is a limit between them"
    assert [len(stage.ops) for stage in found(needed - 1, ranked=True).stages] == [6, 6], "a cut moves where it fits"
