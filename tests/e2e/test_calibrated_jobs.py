"""Jobs learn from their steps: a profile that was spoilt heals, and what is predicted comes nearer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

import msgspec
import pytest
from job import FROM_CACHE, PLANNED, Job

from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common.keys import Key
from rannd.profile.points import Measured
from rannd.runtime.costs.learned_costs import LearnedCosts

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/calibrated.py"
PLAN = {
    "RANNC_PARTITION_NUM": "2",
    "RANNC_PIPELINE_NUM": "2",
    "RANNC_CALIBRATE_AFTER": "8",
    "RANNC_CACHE": "on",
    "OMP_NUM_THREADS": "1",
}
DOUBT = "Stages take something else than their parts"


def stages(output: str) -> list[tuple[int, float]]:
    """Operators and planned time of a microbatch of each stage."""
    return [(int(ops), float(us)) for ops, us in re.findall(r"STAGE (\d+) ([\d.]+)", output)]


def in_cache(job: Job, monkeypatch: pytest.MonkeyPatch, use: Callable[[Client], None]) -> None:
    """Use the cache of a job's home."""
    for name, value in job.environment.items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    with connect(mode="on", timeout_s=30, idle_s=60, max_bytes=1 << 30) as client:
        use(client)


def keys_of(job: Job, kind: str) -> list[Key]:
    listed = json.loads(job.run("rannc-cache", "ls", "--json"))
    return [Key(kind, each["key"], each["components"]) for each in listed if each["kind"] == kind]


def test_a_spoilt_profile_heals_within_one_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    first = job.train(2, PROGRAM, "12", **PLAN)
    assert PLANNED in first
    assert re.search(r"Steps take [\d.]+ ms, predicted were [\d.]+ ms \([+-][\d.]+ %\): computing [+-]", first)
    assert DOUBT not in first
    right = stages(first)

    def spoil(client: Client) -> None:
        slowest = max(
            keys_of(job, "profile"),
            key=lambda key: msgspec.msgpack.decode(client.get(key) or b"", type=Measured).points[-1].backward_us,
        )
        measured = msgspec.msgpack.decode(client.get(slowest) or b"", type=Measured)
        points = tuple(
            msgspec.structs.replace(
                each, forward_us=20 * each.forward_us, backward_us=20 * each.backward_us, weight_us=0.0, spread=0.0
            )
            for each in measured.points
        )
        assert client.put(slowest, msgspec.msgpack.encode(msgspec.structs.replace(measured, points=points)))
        for kind in ("deployment", "learned", "measured"):
            for key in keys_of(job, kind):
                client.discard(key, "of a test")

    in_cache(job, monkeypatch, spoil)
    spoilt = job.train(2, PROGRAM, "12", **PLAN)
    assert PLANNED in spoilt
    assert stages(spoilt)[1][0] < right[1][0], "wide layers seem to be slow: their stage has fewer"
    assert DOUBT in spoilt
    healed = job.train(2, PROGRAM, "12", **PLAN)
    assert PLANNED in healed, "the plan was made of what was spoilt"
    assert DOUBT not in healed
    assert abs(stages(healed)[1][0] - right[1][0]) <= abs(stages(spoilt)[1][0] - right[1][0]) / 2
    again = job.train(2, PROGRAM, "2", **PLAN)
    assert FROM_CACHE in again
    assert stages(again) == stages(healed)


def test_what_steps_took_is_in_the_costs_of_the_next_plan(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    first = job.train(2, PROGRAM, "12", **PLAN)
    assert PLANNED in first or FROM_CACHE in first
    other = {**PLAN, "RANNC_PIPELINE_NUM": "4"}
    control = job.train(2, PROGRAM, "2", **other)
    assert PLANNED in control

    def look(client: Client) -> None:
        (key,) = keys_of(job, "learned")
        learned = msgspec.msgpack.decode(client.get(key) or b"", type=LearnedCosts)
        assert len(learned.stages) >= 2
        assert all(each.forward_us > 0 and each.backward_us > 0 for each in learned.stages)
        slower = [
            msgspec.structs.replace(each, forward_us=2 * each.forward_us, backward_us=2 * each.backward_us)
            for each in learned.stages
        ]
        assert client.put(key, msgspec.msgpack.encode(msgspec.structs.replace(learned, stages=tuple(slower))))
        for deployment in keys_of(job, "deployment"):
            client.discard(deployment, "of a test")

    in_cache(job, monkeypatch, look)
    planned = job.train(2, PROGRAM, "2", **other)
    assert PLANNED in planned
    before, after = (sum(us for _, us in stages(output)) for output in (control, planned))
    assert 1.5 * before < after < 2.5 * before, "parts are as before, stages took twice as long"
