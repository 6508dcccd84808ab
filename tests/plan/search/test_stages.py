"""The stage phase against exhaustive search: the same E in every instance."""

from __future__ import annotations

import math
import re
from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
from brute_force import Plan
from plan_instances import OTHER, Instance, seeds
from thinned import one_in

from rannd.errors import DoesNotFitError, PlanError
from rannd.plan.deployment import Deployment
from rannd.plan.run_modes import RunMode, preference_us, runnable_zero
from rannd.plan.search.bounds import Bounds
from rannd.plan.search.planner import plan
from rannd.plan.search.stages import Choice, Found, _Frontier, _Partial
from rannd.plan.stage_costs.variant import Variant

PLENTY = 10**15


def test_the_instances_are_worth_searching() -> None:
    stages = Counter(len(Instance(seed).plan().stages) for seed in range(300))
    assert stages[2] >= 30, stages
    assert sum(stages[more] for more in (3, 4, 5)) >= 30, stages


def same(instance: Instance, deployment: Deployment, wanted: float | None) -> bool:
    return wanted is not None and math.isclose(deployment.step_us, wanted, rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize(
    "hundred", [0, *(pytest.param(n, marks=pytest.mark.long if n < 4 else pytest.mark.full) for n in range(1, 10))]
)
def test_the_plan_has_the_least_e_of_all(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        instance = Instance(seed)
        assert same(instance, instance.plan(), instance.reference.best(math.inf)), seed


@pytest.mark.parametrize("share", [*(pytest.param(s, marks=pytest.mark.full) for s in (None, 1.0)), 1.2])
@pytest.mark.parametrize("way", one_in(4, OTHER), ids=lambda way: f"{way.schedule} {way.zero}")
def test_it_has_in_every_run_mode(way: RunMode, share: float | None) -> None:
    seen = Counter[bool]()
    for seed in seeds(100):
        instance = Instance(seed, way=way)
        if way.schedule == "zb_h1" and min(instance.world, len(instance.blocks)) == 1:
            continue  # one stage is run as under 1F1B
        limit = PLENTY if share is None else math.ceil(instance.reference.smallest_memory() * share)
        wanted = instance.reference.best(limit)
        if wanted is None:
            with pytest.raises(DoesNotFitError):
                instance.plan(limit)
            continue
        deployment = instance.plan(limit)
        shared = max(len(stage.slots) for stage in deployment.stages) > 1
        assert (deployment.schedule, deployment.zero) == (way.schedule, way.zero if shared else 0)
        assert same(instance, deployment, wanted), seed
        assert all(stage.estimate.total_bytes <= limit + 6 for stage in deployment.stages), seed
        seen[len(deployment.stages) > 1] += 1
    assert seen[True] > len(seeds(100)) / 5, seen


@pytest.mark.parametrize("zero", range(4))
def test_a_plan_that_just_fits_is_found_where_all_microbatches_are_kept(zero: int) -> None:
    """A bound counted what a stage recomputes for each microbatch, which it has of one at a time."""
    instance = Instance(39, way=RunMode("gpipe", zero))
    limit = math.ceil(instance.reference.smallest_memory())
    wanted = instance.reference.best(limit)
    assert wanted is not None
    assert same(instance, instance.plan(limit), wanted)


@pytest.mark.long
def test_a_plan_with_zero_has_to_save_a_twentieth() -> None:
    seen = Counter[int]()
    for seed in range(150):
        ways = [RunMode("1f1b", zero) for zero in runnable_zero("1f1b")]
        instances = [Instance(seed, way=way, offload_params="false") for way in ways]
        first = instances[0]
        limit = math.ceil(first.reference.smallest_memory() * Random(seed).choice([0.8, 1.0, 1.1, 1.3, 2.0]))
        found = [each.reference.best(limit) for each in instances]
        fits = [(us / 0.95 if zero else us, us) for zero, us in enumerate(found) if us is not None]
        _, wanted = min(fits, default=(0.0, None))
        first.way = None
        first.interleaved = True
        if wanted is None:
            with pytest.raises(DoesNotFitError):
                first.plan(limit)
            continue
        deployment = first.plan(limit)
        assert same(first, deployment, wanted), seed
        if found[0] is not None and found[0] * 0.95 <= wanted:
            assert deployment.zero == 0, seed
        seen[deployment.zero] += 1
    assert min(seen[0], seen.total() - seen[0]) > 5, seen


@pytest.mark.parametrize(
    ("share", "checkpointing"),
    [
        *one_in(2, [(share, False) for share in (0.95, 1.0, 1.05, 1.2, 1.5)]),
        (0.95, True),
        *(pytest.param(share, True, marks=pytest.mark.full) for share in (1.0, 1.05, 1.2, 1.5)),
    ],
)
def test_it_has_under_every_memory_limit(share: float, checkpointing: bool) -> None:
    for seed in seeds(100):
        instance = Instance(seed, checkpointing=checkpointing)
        limit = math.ceil(instance.reference.smallest_memory() * share)
        wanted = instance.reference.best(limit)
        if wanted is None:
            with pytest.raises(DoesNotFitError):
                instance.plan(limit)
        else:
            deployment = instance.plan(limit)
            assert same(instance, deployment, wanted), seed
            # Sizes of pieces may be fractions of a byte; an estimate rounds its parts up.
            assert all(stage.estimate.total_bytes <= limit + 3 for stage in deployment.stages), seed


def test_it_has_for_every_number_of_stages_demanded() -> None:
    for seed in seeds(200):
        instance = Instance(seed)
        stages = instance.random.randint(1, min(instance.world, len(instance.blocks)))
        instance.demand(partition_num=stages)
        deployment = instance.plan()
        assert len(deployment.stages) == stages
        assert same(instance, deployment, instance.reference.best(math.inf)), seed


def test_it_has_for_every_number_of_replicas_demanded() -> None:
    for seed in seeds(200):
        instance = Instance(seed, world=8)
        counts = [count for count in range(1, instance.world + 1) if instance.world % count == 0]
        replicas = instance.random.choice([each for each in counts if instance.world // each <= len(instance.blocks)])
        instance.demand(replica_num=replicas)
        deployment = instance.plan()
        assert {len(stage.slots) for stage in deployment.stages} == {replicas}
        assert same(instance, deployment, instance.reference.best(math.inf)), seed


def test_it_has_for_powers_of_two() -> None:
    for seed in seeds(100):
        instance = Instance(seed, world=7, ops=4, limit_dev_num_pot=True)
        deployment = instance.plan()
        assert all(len(stage.slots) in (1, 2, 4, instance.world) for stage in deployment.stages)
        assert same(instance, deployment, instance.reference.best(math.inf)), seed


def test_the_smallest_memory_named_is_the_smallest_that_does() -> None:
    for seed in seeds(200):
        instance = Instance(seed)
        needed = math.ceil(instance.reference.smallest_memory())
        with pytest.raises(DoesNotFitError) as caught:
            instance.plan(needed - 1)
        assert caught.value.needed == needed
        shown = re.search(r"needs (.*) of a device, .*; the limit is (.*?)\. ", str(caught.value))
        assert shown is not None
        assert shown[1] != shown[2], "they differ by one byte"
        assert max(stage.estimate.total_bytes for stage in instance.plan(needed).stages) <= needed + 3


def test_a_stage_recomputes_only_where_it_would_not_fit_otherwise() -> None:
    seen = Counter[bool]()
    partly = 0
    for seed in range(100):
        instance = Instance(seed)
        limit = math.ceil(instance.reference.smallest_memory() * Random(seed).choice([1.0, 1.05, 1.1]))
        deployment = instance.plan(limit)
        chosen = plan_of(deployment)
        for number, stage in enumerate(deployment.stages):
            assert stage.recompute == (instance.reference.memory(chosen, number, recompute=False) > limit)
            assert stage.estimate.total_bytes <= limit + 6
            seen[stage.recompute] += 1
            partly += stage.recompute and not all(stage.segments)
    assert min(seen[True], seen[False]) > 10
    assert partly > 5, "a few stages recompute some of their blocks only"


def plan_of(deployment: Deployment) -> Plan:
    spans = [tuple(map(int, stage.name.split("_")[1:])) for stage in deployment.stages]
    return Plan(
        (*(start for start, _ in spans), spans[-1][1] + 1),
        tuple(len(stage.slots) for stage in deployment.stages),
        deployment.microbatches,
        deployment.schedule,
        deployment.placement,
    )


def wrong(numbers: range) -> list[int]:
    """Instances in which the plan is not the best."""
    found = []
    for seed in numbers:
        instance = Instance(seed)
        if not same(instance, instance.plan(), instance.reference.best(math.inf)):
            found.append(seed)
    return found


@pytest.mark.long
def test_one_best_partial_plan_a_place_would_lose_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """RaNNC's rule: a table with one number in each cell. What these tests would miss is nothing like it."""

    def dominated(frontier: _Frontier, number: int, partial: _Partial) -> bool:
        place = frontier.seen[number, partial.start, partial.used, partial.stages]
        place.append(partial.terms)
        return sum(partial.terms) > min(map(sum, place))

    monkeypatch.setattr(_Frontier, "_dominated", dominated)
    assert wrong(range(150))


@pytest.mark.long
@pytest.mark.parametrize("table", ["rest", "rounds", "together"])
def test_a_bound_that_says_too_much_would_lose_plans(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tighten = Bounds.tighten

    def too_much(bounds: Bounds, *paths: Any) -> None:
        tighten(bounds, *paths)
        setattr(bounds, table, getattr(bounds, table) * 1.3)

    monkeypatch.setattr(Bounds, "tighten", too_much)
    assert wrong(range(150))


@pytest.mark.parametrize("seed", one_in(4, range(100)))
def test_plans_with_and_without_zero_are_compared_by_what_is_preferred(seed: int) -> None:
    instance = Instance(seed)
    limit = math.ceil(instance.reference.smallest_memory() * (1.01 + 0.4 * (seed % 3)))

    def planned(zero: str, ranked: bool = False) -> Deployment | None:
        options = msgspec.structs.replace(
            instance.options,
            zero_stage=zero,
            offload_optimizer="false",
            offload_params="false",
            offload_activations="false",
        )
        try:
            return plan(
                instance.graph, instance.blocks, instance.costs, world=len(instance.slots), slots=tuple(instance.slots),
                batch_rows=instance.batch_rows, memory_bytes=limit, options=options, ranked=ranked,
            )  # fmt: skip
        except (DoesNotFitError, PlanError):
            return None

    each = [found for zero in "0123" if (found := planned(zero)) is not None]
    found = planned("auto")
    assert found is not None
    best = min(preference_us(one.zero, one.e_us) for one in each)
    plain = next((one.e_us for one in each if not one.zero), math.inf)
    if found.zero or found.e_us != plain:  # ZeRO is only looked at where memory is tight
        assert preference_us(found.zero, found.e_us) == pytest.approx(best)
    assert found.bound_us <= found.e_us * (1 + 1e-9)
    if found.searched_all:
        assert found.bound_us == pytest.approx(found.e_us)
    simulated = planned("auto", ranked=True)
    assert simulated is not None
    assert simulated.bound_us <= simulated.e_us * (1 + 1e-9)


def test_plans_of_other_searches_come_after_the_best_of_each() -> None:
    def choice(us: float, *starts: int) -> Choice:
        return Choice(Variant("1f1b", 1, "stages"), (0, *starts), (1,) * (1 + len(starts)), us)

    proved, near, far, other = choice(5.0, 3), choice(6.0, 4), choice(7.0, 5), choice(6.5, 2)
    found = Found(proved, 4.0, False, (proved, far))
    plain, none = Found(near, 1.0, True, (near, proved, other)), Found(None, math.inf, True)
    joined = found.with_plans_of([plain, none])
    assert (joined.choice, joined.bound_us, joined.searched_all) == (proved, 4.0, False), "it alone proves something"
    assert joined.passed == (proved, near, other, far)


def test_the_bound_of_a_plan_that_was_simulated_faster_is_compared_as_its_e_is() -> None:
    """The plan has ZeRO, though the search prefers one without."""
    instance = Instance(126, world=6, ops=8)
    options = msgspec.structs.replace(instance.options, schedule="1f1b", virtual_stages="1")
    limit = math.ceil(instance.reference.smallest_memory() * 1.2)
    found = plan(
        instance.graph, instance.blocks, instance.costs, world=instance.world, slots=instance.slots,
        batch_rows=instance.batch_rows, memory_bytes=limit, options=options, ranked=True,
    )  # fmt: skip
    assert found.zero
    assert found.searched_all
    assert 0 < found.bound_us < found.e_us
