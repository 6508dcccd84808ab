"""What a job makes of its measured steps: what it says, what it learns, and which plan takes whose place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import psutil
import pytest
from plan_graphs import GraphBuilder
from plan_instances import deploy

import pyrannc
from rannd.daemon.common.keys import Key, make_key, measured_key
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.atoms import make_atoms
from rannd.plan.blocks.grains import make_grains
from rannd.plan.deployment import Deployment, Provenance, Slot, decode, encode
from rannd.plan.measured_step import MEASURED_FORMAT, MeasuredStep, RankTimes, StageTimes, Typical
from rannd.plan.plan_options import PlanOptions
from rannd.profile.costs import LinkCost
from rannd.profile.points import Measured, Point
from rannd.runtime.costs.known_costs import MeasuredParts
from rannd.runtime.costs.learned_costs import LearnedCosts, StageTook
from rannd.runtime.costs.learned_runtime import HostTook, LearnedRuntime
from rannd.runtime.planning import plan_ahead
from rannd.runtime.planning.calibration_of_job import (
    comparison,
    is_off,
    runtime_is_off,
    stages_took,
    tells_little,
)
from rannd.runtime.planning.plan_ahead import Better, Request, Wanted

ROWS = 8
KEY = make_key("deployment", {"a": "test"})
SLOTS = (Slot(0, 0), Slot(0, 1))


def layers() -> TaskGraph:
    builder = GraphBuilder()
    value = builder.input()
    for layer in range(8):
        value = builder.op([value], params=[builder.param(1000)], flops=100_000, output=layer == 7)
    return builder.build()


def steps(
    deployment: Deployment, factor: float, *, busy: float = 1.0, rest_us: float = 0.0, threads: float = 0.0
) -> MeasuredStep:
    """Steps in which all computations take `factor` times as long as planned, and others take the processor."""
    ranks = []
    for slot in range(len(deployment.slots)):
        own = []
        for number, stage in enumerate(deployment.stages):
            if slot in stage.slots:
                each = stage.estimate
                times = [factor * us / each.pieces for us in (each.forward_us, each.backward_us)]
                own.append(StageTimes(number, each.pieces, *(Typical(busy * us, us, threads * us) for us in times)))
        computing = sum(s.pieces * (s.forward.median_us + s.backward.median_us) for s in own)
        ranks.append(RankTimes(slot, 20, tuple(own), (), computing + rest_us, 0, 0, 0, 0, 0, 0, 3, rest_us))
    return MeasuredStep(MEASURED_FORMAT, tuple(ranks))


@pytest.fixture
def two() -> Deployment:
    return deploy(layers(), 2, partition_num=2, pipeline_num=4, schedule="1f1b")


def test_what_explains_a_step_is_said(two: Deployment) -> None:
    measured = steps(two, 1.5, rest_us=7000.0)
    computing = max(each.estimate.forward_us + each.estimate.backward_us for each in two.stages)
    told = comparison(two, measured, (1, 0))
    assert told.startswith(f"Steps take {measured.step_us / 1e3:.1f} ms, predicted were {two.step_us / 1e3:.1f} ms (")
    busiest = max(two.stages, key=lambda each: each.estimate.forward_us + each.estimate.backward_us)
    place = f"on rank {1 - busiest.slots[0]}"
    assert f" %), {place}: computing {0.5 * computing / 1e3:+.1f} ms, the runtime itself +7.0 ms" in told
    late = [
        msgspec.structs.replace(each, step_us=measured.step_us + 9.0 * (each.slot != busiest.slots[0]))
        for each in measured.ranks
    ]
    assert place in comparison(two, msgspec.structs.replace(measured, ranks=tuple(late)), (1, 0)), "ranks wait"
    busy = comparison(two, steps(two, 1.5, busy=1.2, rest_us=7000.0), (1, 0))
    assert f"computing {0.5 * computing / 1e3:+.1f} ms, the runtime itself +7.0 ms, processors that others had" in busy
    assert f"had {0.3 * computing / 1e3:+.1f} ms, waiting and transfers" in busy
    copied = comparison(two, steps(two, 1.5, busy=1.2, rest_us=7000.0, threads=0.2), (1, 0))
    assert f"computing {0.5 * computing / 1e3:+.1f} ms, the runtime itself +7.0 ms, waiting and transfers" in copied
    handled = measured.ranks[0].handled
    assert handled == 2 * two.stages[0].estimate.pieces + 3
    known = msgspec.structs.replace(two, call_us=7000.0 - 40.0 * handled, host_us=40.0)
    assert "the runtime itself +0.0 ms" in comparison(known, measured, (1, 0)), "the plan knew it"
    assert not runtime_is_off(known, measured)
    assert not runtime_is_off(two, steps(two, 1.0, rest_us=0.04 * two.step_us))
    assert runtime_is_off(two, steps(two, 1.0, rest_us=0.06 * two.step_us))


def test_busy_machines_are_known(two: Deployment) -> None:
    assert not steps(two, 3.0, busy=1.2).disturbed
    assert steps(two, 1.0, busy=1.3).disturbed
    assert not steps(two, 1.0, busy=1.3, threads=0.2).disturbed, "the rank's own threads copy messages"
    assert steps(two, 1.0, busy=1.6, threads=0.2).disturbed


def request(task: TaskGraph, profile: Mapping[str, Measured], *wanted: Wanted, **changed: Any) -> Request:
    fields: dict[str, Any] = {
        "compiled": False, "by_atoms": False, "toolchain": "", "device_model": "cpu", "threads": 1,
        "versions": {"python": "3", "torch": "2", "rannd": "0"}, "flags": {}, "links": (LinkCost(1, 1e6, 1, 1e6), None),
        "learned": LearnedCosts(), "runtime": LearnedRuntime(), "queued": True, "options": PlanOptions(),
        "interleaved": True, "rows": 8 * ROWS,
        "made": Provenance("cpu", "measured", "0", "2"), "model": "M", "timeout_s": 1.0, "idle_s": 1.0, "max_bytes": 1,
    }  # fmt: skip
    return Request(task=task, profile=dict(profile), wanted=wanted, **{**fields, **changed})


def test_stages_that_took_something_else_are_found(two: Deployment) -> None:
    asked = request(layers(), {})
    for factor, off in ((1.0, False), (1.04, False), (0.96, False), (1.06, True), (0.9, True)):
        took = stages_took(asked, two, steps(two, factor, busy=1.2))
        assert is_off(two, took) == off, factor
    assert list(took) == [0, 1]
    assert took[1].rows == -(-two.batch_rows // 8)
    assert took[1].most == -(-two.batch_rows // 2)
    numbers = {op.name: number for number, op in enumerate(layers().ops)}
    assert took[1].ops == tuple(numbers[name] for name in two.stages[1].ops)
    assert stages_took(asked, two, steps(two, 0.0)) == {}, "nothing was measured"


def test_plans_whose_stages_do_other_things_tell_little(two: Deployment) -> None:
    assert not tells_little(two)
    assert tells_little(msgspec.structs.replace(two, zero=3))
    assert tells_little(msgspec.structs.replace(two, offload=True))
    again = [msgspec.structs.replace(each, recompute=True) for each in two.stages]
    assert tells_little(msgspec.structs.replace(two, stages=tuple(again)))
    half = msgspec.structs.replace(two, stages=(again[0], two.stages[1]))
    assert not tells_little(half)
    assert list(stages_took(request(layers(), {}), half, steps(half, 1.0))) == [1]


class Kept:
    """A cache in this process."""

    connected = True

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def get(self, key: Key) -> bytes | None:
        return self.values.get(key.digest)

    def get_many(self, keys: list[Key]) -> list[bytes | None]:
        return [self.get(key) for key in keys]

    def put(self, key: Key, value: bytes) -> bool:
        self.values[key.digest] = value
        return True

    def discard(self, key: Key, reason: str) -> None:
        self.values.pop(key.digest, None)


def test_what_plans_for_a_model_ends_with_it() -> None:
    """Later it would look for a daemon, and start one, where its model had one."""

    def planning() -> list[psutil.Process]:
        return [each for each in psutil.Process().children() if "plan_ahead" in " ".join(each.cmdline())]

    plan_ahead.start(request(layers(), {}))
    assert len(planning()) == 1, "it imports what it needs for a second or so"
    pyrannc.clear()
    assert planning() == []
    plan_ahead.start(request(layers(), {}))
    assert len(planning()) == 1, "others can be started"
    plan_ahead.end()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    cache = Kept()
    monkeypatch.setattr(plan_ahead, "connect", lambda **_: cache)
    return cache


def profile_of(task: TaskGraph) -> dict[str, Measured]:
    parts = MeasuredParts(task, make_grains(task, make_atoms(task)))
    keys = parts.wanted([tuple(range(len(task.ops)))])
    return {key: Measured((Point(4 * ROWS, 1000.0, 2000.0, 0.0, 0.0),), add_us=1.0) for key in keys}


def test_a_plan_that_measured_costs_make_faster_takes_the_place(
    kept: Kept, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    task = layers()
    profile = profile_of(task)
    options = PlanOptions(partition_num=2, pipeline_num=2, schedule="1f1b")
    make = Wanted(KEY, SLOTS, 10**12)
    assert plan_ahead.run(request(task, profile, make, options=options)) == 1
    best = decode(kept.values[KEY.digest])
    assert [len(stage.ops) for stage in best.stages] == [4, 4]
    assert plan_ahead.run(request(task, profile, make, options=options)) == 0, "it is there"

    # The same for a plan that was cut elsewhere, as if its costs had been others.
    names = [op.name for op in task.ops]
    uneven = tuple(
        msgspec.structs.replace(stage, ops=tuple(ops))
        for stage, ops in zip(best.stages, (names[:1], names[1:]), strict=True)
    )
    worse = msgspec.structs.replace(best, stages=uneven)
    kept.values[measured_key(KEY.digest).digest] = b"of the plan before"
    instead = Wanted(KEY, SLOTS, 10**12, worse)
    assert plan_ahead.run(request(task, profile, instead, options=options)) == 1
    assert decode(kept.values[KEY.digest]).stages == best.stages
    assert measured_key(KEY.digest).digest not in kept.values
    better = msgspec.json.decode(capfdbinary.readouterr().out, type=Better)
    assert better.step_us == pytest.approx(best.step_us)
    assert better.before_us > 1.3 * better.step_us
    assert "2 stages" in better.line

    kept.values.clear()
    instead = Wanted(KEY, SLOTS, 10**12, best)
    assert plan_ahead.run(request(task, profile, instead, options=options)) == 0, "nothing is better"
    assert not kept.values


def test_a_plan_that_stays_has_the_times_by_what_was_learned(
    kept: Kept, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    task = layers()
    profile = profile_of(task)
    options = PlanOptions(partition_num=2, pipeline_num=2, schedule="1f1b")
    assert plan_ahead.run(request(task, profile, Wanted(KEY, SLOTS, 10**12), options=options)) == 1
    there = decode(kept.values[KEY.digest])
    took = [StageTook((0, 1, 2, 3), 16, 32, 2 * 2000.0, 2 * 4000.0)] * 4
    learned = LearnedCosts().and_those(took, doubts=False)
    instead = Wanted(KEY, SLOTS, 10**12, there)
    asked = request(task, profile, instead, options=options, learned=learned)
    assert plan_ahead.run(asked) == 0, "all stages take twice as long, so no other plan is better"
    now = decode(kept.values[KEY.digest])
    assert now.step_us == pytest.approx(2 * there.step_us, rel=0.1)
    for one, other in zip(there.stages, now.stages, strict=True):
        assert (one.ops, one.slots) == (other.ops, other.slots)
        assert other.estimate.forward_us == pytest.approx(2 * one.estimate.forward_us, rel=0.1)
    assert not capfdbinary.readouterr().out

    of_another_job = encode(msgspec.structs.replace(now, step_us=1.0))
    kept.values[KEY.digest] = of_another_job
    assert plan_ahead.run(asked) == 0
    assert kept.values[KEY.digest] == of_another_job


def test_what_was_learned_is_in_the_plans(kept: Kept) -> None:
    task = layers()
    profile = profile_of(task)
    options = PlanOptions(partition_num=2, pipeline_num=2, schedule="1f1b")
    took = [StageTook((0, 1, 2, 3), 16, 32, 2 * 2000.0, 2 * 4000.0)] * 4
    learned = LearnedCosts().and_those(took, doubts=False)
    hosts = tuple(HostTook(task.graph_hash[:16], handled, 500.0 + 7.0 * handled) for handled in (1, 10, 100, 1000))
    runtime = LearnedRuntime(hosts=hosts)
    wanted = Wanted(KEY, SLOTS, 10**12)
    assert plan_ahead.run(request(task, profile, wanted, options=options)) == 1
    plain = decode(kept.values.pop(KEY.digest))
    assert (
        plan_ahead.run(request(task, profile, wanted, options=options, learned=learned, runtime=runtime, queued=False))
        == 1
    )
    found = decode(kept.values[KEY.digest])
    assert (found.call_us, found.host_us) == pytest.approx((500.0, 7.0), rel=0.1)
    for one, other in zip(plain.stages, found.stages, strict=True):
        assert other.estimate.forward_us == pytest.approx(2 * one.estimate.forward_us, rel=0.1)
