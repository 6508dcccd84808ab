"""Jobs learn from their steps: a profile that was spoilt heals, and what is predicted comes nearer."""

from __future__ import annotations

import re

import msgspec
import pytest
from job import FROM_CACHE, PLANNED, Job
from job_cache import LEARNING as PLAN
from job_cache import in_cache, keys_of

from rannd.daemon.client.cache import Client
from rannd.plan.deployment import decode
from rannd.plan.measured_step import decode_measured
from rannd.profile.points import Measured
from rannd.runtime.costs.learned_costs import LearnedCosts
from rannd.runtime.costs.learned_runtime import HostTook, LearnedRuntime

pytestmark = pytest.mark.ranks
MISSED = "the cache does not have the times of "

PROGRAM = "tests/e2e/programs/calibrated.py"
DOUBT = "Stages take something else than their parts"


def stages(output: str) -> list[tuple[int, float]]:
    """Operators and planned time of a microbatch of each stage."""
    return [(int(ops), float(us)) for ops, us in re.findall(r"STAGE (\d+) ([\d.]+)", output)]


@pytest.mark.long
def test_a_spoilt_profile_heals_within_one_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    first = job.train(2, PROGRAM, "12", **PLAN)
    assert PLANNED in first
    assert re.search(r"Steps take [\d.]+ ms, predicted were .* %\), on rank [01]: computing [+-]", first)
    assert DOUBT not in first
    right = stages(first)

    def spoil(client: Client) -> None:
        slowest = max(  # the last layer with the loss: by a tenth, and by less in backward
            keys_of(job, "profile"),
            key=lambda key: msgspec.msgpack.decode(client.get(key) or b"", type=Measured).points[-1].forward_us,
        )
        measured = msgspec.msgpack.decode(client.get(slowest) or b"", type=Measured)
        points = tuple(
            msgspec.structs.replace(
                each, forward_us=200 * each.forward_us, backward_us=200 * each.backward_us, weight_us=0.0, spread=0.0
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
    assert max(us for _, us in stages(healed)) < 2 * max(us for _, us in right) < max(us for _, us in stages(spoilt))
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
        quicker = [
            msgspec.structs.replace(each, forward_us=0.5 * each.forward_us, backward_us=0.5 * each.backward_us)
            for each in learned.stages
        ]
        assert client.put(key, msgspec.msgpack.encode(msgspec.structs.replace(learned, stages=tuple(quicker))))
        for deployment in keys_of(job, "deployment"):
            client.discard(deployment, "of a test")

    in_cache(job, monkeypatch, look)
    planned = job.train(2, PROGRAM, "2", **other)
    assert PLANNED in planned
    before, after = (sum(us for _, us in stages(output)) for output in (control, planned))
    assert 0.3 * before < after < 0.75 * before, "parts are as before, stages took half as long"


@pytest.mark.long
def test_what_the_runtime_took_is_in_the_costs_of_other_models(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.train(2, PROGRAM, "12", **PLAN)

    def slow_down(client: Client) -> None:
        (key,) = keys_of(job, "runtime")
        runtime = msgspec.msgpack.decode(client.get(key) or b"", type=LearnedRuntime)
        assert runtime.hosts
        assert all(each.handled > 4 and 100 < each.us < 1e6 for each in runtime.hosts)
        hosts = (HostTook("of another model", handled, 8e3 + 300.0 * handled) for handled in (10, 20, 40, 80))
        assert client.put(key, msgspec.msgpack.encode(LearnedRuntime(hosts=tuple(hosts))))

    in_cache(job, monkeypatch, slow_down)
    before = {key.digest for key in keys_of(job, "deployment")}
    assert PLANNED in job.train(2, "examples/tutorial.py", "8", "32", "4", **PLAN)

    def look(client: Client) -> None:
        (key,) = (key for key in keys_of(job, "deployment") if key.digest not in before)
        planned = decode(client.get(key) or b"")
        assert planned.call_us + 30 * planned.host_us == pytest.approx(8e3 + 9e3, rel=0.2)
        assert planned.step_us > planned.call_us + 8 * planned.host_us, "and of its two microbatches"

    in_cache(job, monkeypatch, look)


@pytest.mark.long
def test_what_reductions_took_is_learned(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run("rannc-cache", "clear")
    replicas = {**PLAN, "RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "2"}
    assert "Steps take" in job.train(2, PROGRAM, "12", **replicas)

    def look(client: Client) -> None:
        (key,) = keys_of(job, "runtime")
        runtime = msgspec.msgpack.decode(client.get(key) or b"", type=LearnedRuntime)
        (took,) = runtime.reductions
        (deployment,) = (decode(client.get(each) or b"") for each in keys_of(job, "deployment"))
        (measured,) = (decode_measured(client.get(each) or b"", deployment) for each in keys_of(job, "measured"))
        assert took.nbytes == deployment.stages[0].estimate.param_bytes, "half of the gradients, there and back"
        assert took.us < measured.step_us
        for rank in measured.ranks:
            assert 0 < rank.pack_us < rank.reduce_us, "the first bucket begins within a backward"

    in_cache(job, monkeypatch, look)


@pytest.mark.long
def test_costs_that_the_cache_has_lost_are_measured_again_or_missed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.run("rannc-cache", "clear")
    job.train(2, PROGRAM, "12", **PLAN)

    def lose(*kinds: str) -> None:
        def look(client: Client) -> None:
            for kind in kinds:
                assert keys_of(job, kind)
                for key in keys_of(job, kind):
                    client.discard(key, "of a test")

        in_cache(job, monkeypatch, look)

    lose("links", "learned", "runtime")
    again = job.train(2, PROGRAM, "12", **PLAN)
    assert FROM_CACHE in again
    assert MISSED not in again
    lose("profile", "learned", "runtime")
    without = job.train(2, PROGRAM, "12", **PLAN)
    assert FROM_CACHE in without
    assert MISSED in without
    assert not keys_of(job, "learned")


@pytest.mark.long
@pytest.mark.parametrize("setting", ["RANNC_CHECK_NAN", "RANNC_VERIFY_RECOMP"])
def test_nothing_is_learned_while_rannd_looks_at_all_values(job: Job, setting: str) -> None:
    job.run("rannc-cache", "clear")
    value = "all" if setting == "RANNC_CHECK_NAN" else "true"
    output = job.train(2, PROGRAM, "12", **PLAN, **{setting: value})
    assert "Steps take" in output
    assert not keys_of(job, "learned")
    assert not keys_of(job, "runtime")
