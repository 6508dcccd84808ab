"""Plans and costs in the cache that no job of ours can have stored: they are put out of it and made anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec
import pytest
import torch
from torch import nn

import pyrannc
from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common.keys import Key
from rannd.plan import deployment, measured_step
from rannd.profile.points import Measured, is_plausible

Kept = dict[str, dict[Key, bytes]]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """What jobs of this test have stored, by kind."""
    found: Kept = {}
    put = Client.put_many

    def noted(client: Client, items: Iterable[tuple[Key, bytes]]) -> int:
        listed = list(items)
        for key, value in listed:
            found.setdefault(key.kind, {})[key] = value
        return put(client, listed)

    monkeypatch.setenv("RANNC_CACHE", "on")
    monkeypatch.setattr(Client, "put_many", noted)
    return found


def run() -> None:
    pyrannc.RaNNCModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))(torch.randn(3, 4))
    pyrannc.clear()


def client() -> Client:
    return connect(mode="on", timeout_s=30, idle_s=300, max_bytes=1 << 30)


def negative(found: Measured) -> Measured:
    return msgspec.structs.replace(found, add_us=-1.0)


def not_a_number(found: Measured) -> Measured:
    points = tuple(msgspec.structs.replace(point, forward_us=math.nan) for point in found.points)
    return msgspec.structs.replace(found, points=points)


def empty(found: Measured) -> Measured:
    return msgspec.structs.replace(found, points=())


def endless(found: Measured) -> Measured:
    points = tuple(msgspec.structs.replace(point, forward_us=1e290) for point in found.points)
    return msgspec.structs.replace(found, points=points)


def immense(found: Measured) -> Measured:
    points = tuple(msgspec.structs.replace(point, activation_bytes=2.0**52) for point in found.points)
    return msgspec.structs.replace(found, points=points)


@pytest.mark.parametrize("change", [negative, not_a_number, empty, endless, immense])
def test_times_that_cannot_be_are_measured_again(kept: Kept, change: Callable[[Measured], Measured]) -> None:
    run()
    profiles, plans = kept.pop("profile"), kept.pop("deployment")
    with client() as cache:
        for key in plans:
            cache.discard(key, "made again")
        for key, value in profiles.items():
            cache.put(key, msgspec.msgpack.encode(change(msgspec.msgpack.decode(value, type=Measured))))
    kept.clear()
    run()
    assert kept["deployment"].keys() == plans.keys()
    assert kept["profile"].keys() == profiles.keys()
    with client() as cache:
        for value in cache.get_many(list(profiles)):
            assert value is not None
            assert is_plausible(msgspec.msgpack.decode(value, type=Measured))


def test_a_plan_for_other_rows_than_its_key_says_is_made_again(kept: Kept) -> None:
    """A program of so many microbatches would be made before any row is seen."""
    run()
    ((key, value),) = kept.pop("deployment").items()
    wrong = msgspec.structs.replace(deployment.decode(value), microbatches=10**5, batch_rows=10**5)
    with client() as cache:
        cache.put(key, deployment.encode(wrong))
    kept.clear()
    run()
    assert kept["deployment"].keys() == {key}
    assert deployment.decode(kept["deployment"][key]).batch_rows == 3


def train(steps: int) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    wrapped = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(steps):
        wrapped(torch.randn(32, 64)).square().mean().backward()
    pyrannc.clear()


def test_one_rank_learns_from_a_cached_plan(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CALIBRATE_AFTER", "3")
    monkeypatch.setattr(measured_step, "BUSY", math.inf)
    train(1)
    assert "deployment" in kept
    assert "learned" not in kept
    train(8)
    assert {"learned", "runtime", "measured"} <= kept.keys()


def test_times_that_others_have_disturbed_replace_no_better_ones(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CALIBRATE_AFTER", "3")
    monkeypatch.setattr(measured_step, "BUSY", 0.5)
    train(8)
    ((key, first),) = kept["measured"].items()
    told = msgspec.msgpack.decode(first, type=measured_step.MeasuredStep)
    assert told.disturbed
    (stage,) = told.ranks[0].stages
    forward = msgspec.structs.replace(stage.forward, own_us=1e6 * stage.forward.median_us)
    quiet = msgspec.structs.replace(told.ranks[0], stages=(msgspec.structs.replace(stage, forward=forward),))
    calm = msgspec.msgpack.encode(msgspec.structs.replace(told, ranks=(quiet,)))
    with client() as cache:
        cache.put(key, calm)
        train(8)
        assert cache.get(key) == calm
        cache.put(key, b"junk")
        train(8)
        assert cache.get(key) not in (calm, b"junk")


def test_what_steps_took_goes_with_the_plan_that_is_made_anew(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CALIBRATE_AFTER", "3")
    train(8)
    (key,) = kept["measured"]
    with client() as cache:
        assert cache.get(key) is not None
    monkeypatch.setenv("RANNC_CACHE", "refresh")
    train(1)
    with client() as cache:
        assert cache.get(key) is None
