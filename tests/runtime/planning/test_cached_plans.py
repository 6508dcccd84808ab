"""Plans in the cache that no job of ours can have stored: they are put out of it and made anew."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
import torch
from torch import nn

import pyrannc
from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common.keys import Key
from rannd.plan import deployment

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
