"""What is in the cache and cannot be used, or is wrong, is put out of it: no later run meets it again."""

from __future__ import annotations

import argparse
import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import rnn

import pyrannc
from rannd import log
from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common.keys import Key
from rannd.runtime.traces import shape_families, trace_provider
from rannd.runtime.traces.trace_notices import Notices


class Times(nn.Module):
    """A layer, and a factor that is part of the graph."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.factor


class Runs:
    """Jobs of one process that share a cache, one after another; what they kept, and how often they traced."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kept: list[tuple[Key, bytes]] = []
        self.traced = 0
        put = Client.put

        def noted(client: Client, key: Key, value: bytes) -> bool:
            if key.kind == "trace":
                self.kept.append((key, value))
            return put(client, key, value)

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def counting(*args: Any) -> Any:
                self.traced += 1
                return function(*args)

            return counting

        patch.setattr(Client, "put", noted)
        patch.setattr(trace_provider, "trace", counted(trace_provider.trace))
        patch.setattr(shape_families, "template", counted(shape_families.template))

    def run(self, factor: float = 2.0, lengths: tuple[int, ...] = ()) -> int:
        """One job; its outputs have to be the model's. Returns how often it traced."""
        before = self.traced
        inner = Times(factor)
        model = pyrannc.RaNNCModule(inner, None)
        for shape in [(3, length, 4) for length in lengths] or [(3, 4)]:
            x = torch.randn(shape)
            expected = nn.functional.linear(x, inner.layer.weight, inner.layer.bias) * factor
            torch.testing.assert_close(model(x), expected)
        pyrannc.clear()
        return self.traced - before


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    monkeypatch.setenv("RANNC_CACHE", "on")
    return Runs(monkeypatch)


def stored(key: Key) -> bytes | None:
    with _client() as client:
        return client.get(key)


def overwrite(key: Key, value: bytes) -> None:
    with _client() as client:
        assert client.put(key, value)


def _client() -> Client:
    return connect(mode="on", timeout_s=30, idle_s=300, max_bytes=1 << 30)


OPTIONS = argparse.Namespace(factor=2.0)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * OPTIONS.factor  # type: ignore[no-any-return]


@pytest.mark.usefixtures("runs")
def test_why_traces_are_not_cached_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANNC_LOG_LEVEL", "info")
    model = pyrannc.RaNNCModule(Scaled(), None)
    with caplog.at_level(logging.INFO):
        for mode in (True, False):
            model.train(mode)(torch.ones(3, 4))
    told = [each.getMessage() for each in caplog.records if "cannot be cached" in each.getMessage()]
    assert len(told) == 1
    assert "global OPTIONS uses module argparse" in told[0]
    assert told[0].endswith("read it in __init__, and keep it as an attribute")


def test_a_rank_whose_traces_alone_cannot_be_cached_is_named(caplog: pytest.LogCaptureFixture) -> None:
    log.setup(level="info")
    with caplog.at_level(logging.INFO):
        Notices().tell_uncached(["", "it reads a clock", ""])
    (told,) = caplog.records
    assert told.getMessage().startswith("The trace cannot be cached (ranks [1]): it reads a clock. ")


class Packed(nn.Module):
    """The lengths are on the CPU, where code can read them while it is traced, but no graph can show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gru = nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(self.layer(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def test_packing_in_forward_is_named_and_a_line_of_tracing_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANNC_LOG_LEVEL", "info")
    inner = Packed().double()
    model = pyrannc.RaNNCModule(inner, None)
    with caplog.at_level(logging.INFO):
        for length in (5, 6):
            x, lengths = torch.randn(3, length, 4).double(), torch.tensor([length, 2, 3])
            torch.testing.assert_close(model(x, lengths), copy.deepcopy(inner)(x, lengths))
    told = [each.getMessage() for each in caplog.records]
    (warning,) = [line for line in told if "data parallel only" in line]
    assert "forward calls gru with a PackedSequence: put packing, gru and unpacking into a separate sub" in warning
    traced = [line for line in told if line.startswith("Tracing: ")]
    assert traced
    assert len(set(traced)) == len(traced)


@pytest.mark.parametrize("damage", ["no trace at all", "another hash", "not of this model"])
def test_a_trace_that_cannot_be_used_is_replaced(runs: Runs, damage: str) -> None:
    assert runs.run() == 1
    assert runs.run() == 0
    ((key, good),) = runs.kept
    bad = {
        "no trace at all": good[:64] + b"nothing",
        "another hash": b"0" * 64 + good[64:],
        "not of this model": _foreign(runs, key),
    }[damage]
    overwrite(key, bad)
    assert runs.run() == 1
    assert stored(key) == good
    assert runs.run() == 0


def _foreign(runs: Runs, key: Key) -> bytes:
    """A sound trace of a model with other parameters."""
    pyrannc.RaNNCModule(nn.Sequential(nn.Linear(4, 4)), None)(torch.randn(3, 4))
    pyrannc.clear()
    other, value = runs.kept.pop()
    assert other != key
    return value


def test_a_trace_that_proves_wrong_is_discarded(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.run(2.0) == 1
    assert runs.run(3.0) == 1
    (key, good), (_, wrong) = runs.kept
    overwrite(key, wrong)
    monkeypatch.setenv("RANNC_VERIFY_PARTITIONING", "true")
    assert runs.run(2.0) == 1
    assert stored(key) is None
    monkeypatch.setenv("RANNC_VERIFY_PARTITIONING", "false")
    assert runs.run(2.0) == 1
    assert stored(key) == good
    assert runs.run(2.0) == 0


def test_a_template_that_cannot_be_used_is_replaced(runs: Runs) -> None:
    lengths = (5, 7, 9)
    assert runs.run(lengths=lengths) == 2  # the first length, and the template of the others
    assert runs.run(lengths=lengths) == 0
    key, good = runs.kept[-1]
    overwrite(key, b"nothing")
    assert runs.run(lengths=lengths) == 1
    assert stored(key) == good
    assert runs.run(lengths=lengths) == 0


def keeping(features: dict[str, Any]) -> Callable[..., None]:
    def keep(module: nn.Module, given: Any, result: torch.Tensor) -> None:
        features["h"] = result

    return keep


def test_a_hook_of_the_scripts_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It kept the tensor of the trace, and the script computed with it, without a word."""
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    inner[1].register_forward_hook(keeping({}))
    torch.nn.utils.parametrizations.weight_norm(inner[0])
    model = pyrannc.RaNNCModule(inner)
    model(torch.randn(2, 4))
    model(torch.randn(2, 4))
    assert caplog.text.count("Forward hook keeping.<locals>.keep of module 1: what it does to tensors is part") == 1
