"""Times of actions: what is inside of the blocks counts, and an accelerator's when it has done them."""

from __future__ import annotations

import time

import pytest
import torch

from rannd.device.action_clock import ActionClock, Timed


def test_what_is_inside_counts() -> None:
    clock = ActionClock(torch.device("cpu"))
    begun = time.perf_counter()
    for _ in range(2):
        clock.expect(10.0, 5.0)
        for _ in range(3):  # an action of three blocks
            with clock:
                time.sleep(0.01)
            time.sleep(0.02)
    passed_us = (time.perf_counter() - begun) * 1e6
    measured_us, *expected = clock.take()
    assert 60_000 <= measured_us <= passed_us - 120_000
    assert expected == [20.0, 10.0]
    assert clock.take() == Timed()


def test_an_action_that_fails_ends() -> None:
    clock = ActionClock(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), clock:
        _ = 1 / 0
    assert clock.take().measured_us > 0


class Event:
    """An event of a device that has come to `reached`; each is a millisecond after the one before."""

    reached = 0
    made = 0

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert device.type == "cuda"
        assert enable_timing
        Event.made += 1
        self.number = Event.made

    def record(self, stream: str) -> None:
        assert stream == "current"

    def query(self) -> bool:
        return self.number <= Event.reached

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query()
        return float(other.number - self.number)


def test_what_a_device_has_not_done_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "current")
    clock = ActionClock(torch.device("cuda", 0))
    for number in range(3):
        clock.expect(10.0 ** (number + 1), 1.0)
        with clock:
            pass
    assert clock.take() == Timed(), "the device has done nothing yet"
    Event.reached = 5  # of six
    assert clock.take() == Timed(2000.0, 110.0, 2.0)
    Event.reached = 6
    assert clock.take() == Timed(1000.0, 1000.0, 1.0)
    assert clock.take() == Timed()
