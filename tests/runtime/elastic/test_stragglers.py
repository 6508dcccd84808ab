"""Which hosts are slow, when that is told, and what is measured for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pyrannc
from rannd.device.action_clock import ActionClock
from rannd.plan.deployment import Slot
from rannd.ranks import rank_notes
from rannd.runtime.elastic import stragglers
from rannd.runtime.elastic.stragglers import Stragglers, slow_hosts


def _slow(*ratios: float, factor: float = 1.5) -> dict[int, float]:
    return slow_hosts([dict(enumerate(ratios))], factor)


def test_a_host_that_is_slower_than_the_others_is_slow() -> None:
    assert _slow(1.0, 1.2, 2.4) == {2: pytest.approx(2.0)}
    assert _slow(1.0, 1.0, 1.5) == {}, "not more than the factor"
    assert _slow(1.0, 1.0, 1.5, factor=1.4) == {2: 1.5}


def test_a_plan_that_is_wrong_everywhere_accuses_nobody() -> None:
    assert _slow(3.0, 3.1, 2.9) == {}
    assert _slow(0.1, 0.12, 0.3) == {2: pytest.approx(2.5)}


def test_of_two_hosts_the_faster_one_is_the_measure() -> None:
    assert _slow(2.0, 1.0) == {0: 2.0}
    assert _slow(1.0, 1.0, 3.0, 4.0) == {2: 3.0, 3: 4.0}


def test_one_host_is_not_slow() -> None:
    assert _slow(9.0) == {}
    assert _slow() == {}


def test_a_host_has_to_be_slow_whatever_its_time_depends_on() -> None:
    """A rank with two rows, and one with one: by the plan, and by its rows."""
    assert slow_hosts([{0: 0.5, 1: 1.0}, {0: 1.0, 1: 1.0}], 1.5) == {}, "times grow with rows"
    assert slow_hosts([{0: 1.0, 1: 1.0}, {0: 2.0, 1: 1.0}], 1.5) == {}, "times do not"
    assert slow_hosts([{0: 0.5, 1: 4.0}, {0: 1.0, 1: 4.0}], 1.5) == {1: 4.0}


# --- when it is told ------------------------------------------------------------------------------

QUICK, SLOW = (1000, 1000), (2300, 2300)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """What rank 0 tells rannc-run; comparisons are not seconds apart."""
    told: list[dict[str, int]] = []
    monkeypatch.setattr(stragglers, "SECONDS", 0.0)
    monkeypatch.setattr(rank_notes, "heard", lambda: True)
    monkeypatch.setattr(rank_notes, "tell", lambda **fields: told.append(fields))
    return told


def _world(rank: int = 0, nodes: int = 2) -> Any:
    """Two ranks on each of several nodes; ranks are in another order than slots."""
    slots = tuple(Slot(node, device) for node in range(nodes) for device in range(2))
    ranks = tuple(reversed(range(2 * nodes)))
    hosts = tuple(f"h{slots[ranks.index(each)].node}" for each in range(2 * nodes))
    device = torch.device("cpu")
    return SimpleNamespace(
        rank=rank, size=2 * nodes, slots=slots, rank_of_slot=ranks, hosts=hosts, device=device, clock=None
    )


def _steps(found: Stragglers, count: int, first: tuple[int, int]) -> None:
    """Steps in which the ranks 0 and 1, those of the last host, tell `first`."""
    for _ in range(count):
        found.take([first, first, QUICK, QUICK])


def test_a_host_is_told_once_after_two_comparisons(
    notes: list[dict[str, int]], caplog: pytest.LogCaptureFixture
) -> None:
    found = Stragglers(_world(), 1.5)
    with caplog.at_level(logging.WARNING):
        _steps(found, 2 * stragglers.STEPS - 1, SLOW)
        assert not notes
        _steps(found, 1, SLOW)
    assert notes == [{"slow": 0, "slow_percent": 230, "least_rows": 0, "most_rows": 0}]
    assert "host h1 computes 2.30 times as long as planned, the others 1.00 times" in caplog.text
    _steps(found, 4 * stragglers.STEPS, SLOW)
    assert len(notes) == 1


def test_where_rows_can_move_the_time_of_a_row_is_told(notes: list[dict[str, int]]) -> None:
    """The host has fewer rows already, and has become slower."""
    found = Stragglers(_world(), 1.5, lambda: (2, 170), (231, 231, 100, 100))
    _steps(found, 2 * stragglers.STEPS, (2100, 5000))
    assert notes == [{"slow": 0, "slow_percent": 500, "least_rows": 2, "most_rows": 170}]


def test_a_host_with_fewer_rows_that_has_recovered_is_told_once(notes: list[dict[str, int]]) -> None:
    found = Stragglers(_world(), 1.5, lambda: (2, 170), (231, 231, 100, 100))
    _steps(found, 2 * stragglers.STEPS, (1000, 2310))
    assert not notes, "it is as slow as it was"
    _steps(found, stragglers.STEPS, (450, 1040))
    _steps(found, stragglers.STEPS, (1000, 2310))
    assert not notes, "twice in a row"
    _steps(found, 4 * stragglers.STEPS, (450, 1040))
    assert notes == [{"slow": 0, "slow_percent": 100, "least_rows": 2, "most_rows": 170}]


def test_a_host_that_is_slow_now_and_then_is_not_told(notes: list[dict[str, int]]) -> None:
    found = Stragglers(_world(), 1.5)
    for _ in range(3):
        _steps(found, stragglers.STEPS, SLOW)
        _steps(found, stragglers.STEPS, QUICK)
    for _ in range(10):  # less than half of the steps of any comparison
        _steps(found, 2, SLOW)
        _steps(found, 3, QUICK)
    assert not notes


def test_a_rank_that_measures_nothing_does_not_count(notes: list[dict[str, int]]) -> None:
    found = Stragglers(_world(), 1.5)
    for _ in range(2 * stragglers.STEPS):
        found.take([SLOW, (0, 0), (0, 0), QUICK])
    assert len(notes) == 1
    for _ in range(4 * stragglers.STEPS):
        found.take([SLOW, SLOW, (0, 0), (0, 0)])
    assert len(notes) == 1


@pytest.mark.parametrize(("factor", "nodes", "heard"), [(0.0, 2, True), (1.5, 1, True), (1.5, 2, False)])
def test_ranks_measure_only_if_rank_0_compares(
    notes: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch, factor: float, nodes: int, heard: bool
) -> None:
    monkeypatch.setattr(rank_notes, "heard", lambda: heard)
    for rank in (0, 1):
        world = _world(rank, nodes)
        found = Stragglers(world, factor if rank == 0 else 1.5)
        if rank == 0:
            off = found.ratios()
        found.take([off] + [QUICK] * (world.size - 1))
        assert world.clock is None


def test_rank_0_decides_for_the_others() -> None:
    world = _world(1)
    found = Stragglers(world, 0.0)
    assert found.ratios() == (0, 0)
    found.take([QUICK] * 4)
    assert world.clock is not None
    world.clock.expect(1e-3, 2e-3)
    with world.clock:
        pass
    ratio, scaled = found.ratios()
    assert ratio > scaled > 0
    found.close()
    assert world.clock is None


# --- what is measured -----------------------------------------------------------------------------


@pytest.fixture
def clean() -> Iterator[None]:
    yield
    pyrannc.clear()


@pytest.mark.usefixtures("clean")
def test_forward_and_backward_of_a_model_are_measured() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model: Any = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), 0.1))
    rows = torch.randn(8, 4)
    model(rows).sum().backward()
    world = model._session.world
    world.clock = clock = ActionClock(torch.device("cpu"))
    model(rows).sum().backward()
    (stage,) = model._session.deployment.stages
    done = clock.take()
    planned_us = stage.estimate.forward_us + stage.estimate.backward_us
    assert done.measured_us > 0
    assert done.planned_us == pytest.approx(planned_us)
    assert done.scaled_us == pytest.approx(planned_us)
    model(rows[:4]).sum().backward()
    assert clock.take().scaled_us == pytest.approx(planned_us / 2)
    with torch.no_grad():
        model(rows)
    assert clock.take().planned_us < planned_us
    world.clock = None
    model(rows).sum().backward()
    assert clock.take().measured_us == 0
