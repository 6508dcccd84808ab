"""How long hosts that come wait for the next restart."""

from __future__ import annotations

from rannd.runner.elastic.patience import FEW, Patience


def _restarted(cost_s: float, gap_s: float, changes: int = FEW) -> tuple[Patience, float]:
    """A job that has seen changes, one every so many seconds, and whose restart took so long; and the time now."""
    patience = Patience()
    patience.ask(0.0)
    patience.start(5.0)
    patience.step(cost_s)
    now = 0.0
    for _ in range(changes):
        now += gap_s
        patience.change(now)
    return patience, now


def test_before_a_restart_was_measured_hosts_join_at_once() -> None:
    patience = Patience()
    for now in range(20):
        patience.change(float(now))
    assert patience.cost_s is None
    assert patience.join_at(20.0, 1, 1000) == 20.0


def test_after_few_changes_hosts_join_at_once() -> None:
    patience, now = _restarted(20.0, 1.0, FEW - 1)
    assert patience.join_at(now, 1, 100) == now
    patience.change(now)
    assert patience.join_at(now, 1, 100) == now + 2000.0


def test_hosts_wait_until_what_they_do_not_do_is_worth_a_restart() -> None:
    patience, now = _restarted(20.0, 10.0)
    price = 20.0 * 128
    assert patience.join_at(now, 8, 128) == now + price / 8
    assert patience.join_at(now + 100.0, 16, 128) == now + 100.0 + (price - 8 * 100.0) / 16
    assert patience.join_at(now + 120.0, 32, 128) == now + 120.0 + (price - 8 * 100.0 - 16 * 20.0) / 32
    assert patience.join_at(now + 200.0, 40, 128) == now + 200.0, "it is past"


def test_hosts_that_are_gone_wait_no_longer() -> None:
    patience, now = _restarted(20.0, 10.0)
    patience.join_at(now, 8, 128)
    patience.join_at(now + 100.0, 0, 128)
    assert patience.join_at(now + 110.0, 8, 128) == now + 110.0 + (20.0 * 128 - 8 * 100.0) / 8


def test_where_changes_are_rare_hosts_do_not_wait() -> None:
    """8 of 64 slots would wait for 160 s; changes every 150 s are frequent then, and every 170 s rare."""
    for gap_s, wait_s in ((150.0, 160.0), (170.0, 0.0)):
        patience, now = _restarted(20.0, gap_s)
        assert patience.join_at(now, 8, 64) == now + wait_s


def test_the_latest_changes_count() -> None:
    for latest, wait_s in ((FEW, 0.0), (2 * FEW, 160.0)):
        patience, now = _restarted(20.0, 3600.0, 100)
        for _ in range(latest):
            now += 1.0
            patience.change(now)
        assert patience.join_at(now, 8, 64) == now + wait_s


def test_all_join_at_a_restart() -> None:
    patience, now = _restarted(20.0, 10.0)
    patience.join_at(now, 8, 64)
    patience.start(now + 150.0)
    assert patience.join_at(now + 200.0, 8, 72) == now + 200.0 + 20.0 * 72 / 8


def test_a_start_that_nobody_has_asked_for_is_a_change() -> None:
    patience, now = _restarted(20.0, 1.0, FEW - 1)
    patience.ask(now)
    patience.start(now)
    assert patience.join_at(now, 1, 10) == now
    patience.start(now)  # a failure
    assert patience.join_at(now, 1, 10) > now


def test_the_cost_of_a_restart_is_the_median_to_the_first_step() -> None:
    patience = Patience()
    patience.start(0.0)
    patience.step(50.0)
    assert patience.cost_s is None, "nobody was asked to leave"
    for begun, cost_s in ((100.0, 20.0), (200.0, 90.0), (300.0, 22.0)):
        patience.ask(begun)
        patience.start(begun + 5.0)
        patience.step(begun + cost_s)
        patience.step(begun + cost_s + 1.0)
    assert patience.cost_s == 22.0


def test_a_start_that_fails_before_its_first_step_is_not_measured() -> None:
    patience = Patience()
    patience.ask(0.0)
    patience.start(5.0)
    patience.start(30.0)
    patience.step(40.0)
    assert patience.cost_s is None
