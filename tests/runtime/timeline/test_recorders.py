"""What a rank records: sums of each step, the latest events, and on a device what it has done by then."""

from __future__ import annotations

import time

import pytest
import torch

from rannd.plan.schedule.program import Action, ActionKind
from rannd.runtime.timeline import host_recorder
from rannd.runtime.timeline.device_recorder import DeviceRecorder
from rannd.runtime.timeline.event_ring import EventRing
from rannd.runtime.timeline.host_recorder import HostRecorder
from rannd.runtime.timeline.recorder import OFF, Doing, StepRecorder
from rannd.runtime.timeline.recorders import recorder_for

CPU = torch.device("cpu")
F0, F1 = (Action(ActionKind.FORWARD, piece) for piece in (0, 1))


def step(recorder: StepRecorder, number: int, *, counted: bool = True) -> None:
    """A step of two forwards, with an agreement."""
    recorder.begin_step(number)
    begun = recorder.begin_on_host()
    recorder.end_on_host(Doing.AGREE, begun)
    if counted:
        recorder.count_step()
    for action in (F0, F1):
        mark = recorder.begin()
        time.sleep(0.002)
        recorder.end(Doing.FORWARD, 0, 0, action, mark)
    recorder.end_on_host(Doing.CALL, begun)


def test_the_items_choose() -> None:
    assert recorder_for(CPU, "off", "") is OFF
    assert recorder_for(CPU, "false", "") is OFF
    assert not OFF.on
    for words, full in (
        (("summary", ""), False),
        (("full", ""), True),
        (("true", ""), True),
        (("off", "x.json"), True),
    ):
        recorder = recorder_for(CPU, *words)
        step(recorder, 0)
        recorder.begin_step(1)
        assert len(recorder.rows()) == 1
        assert bool(recorder.events(0)) == full, words


def test_nothing_is_recorded_by_the_one_that_is_off() -> None:
    step(OFF, 0)
    OFF.begin_step(1)
    OFF.settle()
    assert OFF.rows() == []
    assert OFF.events(0) == []


def test_sums_are_of_what_was_done() -> None:
    recorder = HostRecorder(full=False)
    begun = time.perf_counter_ns()
    step(recorder, 7)
    assert recorder.rows() == [], "the step goes on until the next one begins"
    recorder.begin_step(8)
    passed = time.perf_counter_ns() - begun
    (row,) = recorder.rows()
    assert row.number == 7
    count, ns = row.sums[Doing.FORWARD, 0, 0]
    assert count == 2
    assert 4_000_000 <= ns <= row.sums[Doing.CALL, -1, -1][1] <= row.end_ns - row.begin_ns <= passed
    assert row.begin_ns <= row.agreed_ns <= row.end_ns


def test_steps_that_do_not_count_are_not_told_and_old_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_recorder, "ROWS", 4)
    recorder = HostRecorder(full=False)
    for number in range(8):
        recorder.begin_step(number)
        if number != 6:
            recorder.count_step()
    recorder.begin_step(8)
    assert [row.number for row in recorder.rows()] == [3, 4, 5, 7]


def test_events_are_those_of_a_step() -> None:
    recorder = HostRecorder(full=True)
    for number in range(3):
        step(recorder, number)
    recorder.begin_step(3)
    for number in range(3):
        events = recorder.events(number)
        assert [(doing, action) for doing, action, _, _ in events] == [
            (Doing.AGREE, None),
            (Doing.FORWARD, F0),
            (Doing.FORWARD, F1),
        ]
        assert all(begin <= end for _, _, begin, end in events)
        assert events[1][3] <= events[2][2]
    assert recorder.events(3) == []


def test_a_ring_that_is_full_forgets_the_oldest() -> None:
    ring: EventRing[str] = EventRing(3)
    for number in range(5):
        ring.add(number // 2, f"e{number}", number, number + 1)
    assert ring.of_step(0) == []
    assert sorted(ring.of_step(1)) == [("e2", 2, 3), ("e3", 3, 4)]
    assert ring.of_step(2) == [("e4", 4, 5)]


def test_a_step_of_which_events_are_lost_is_not_told_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_recorder, "EventRing", lambda: EventRing(4))
    recorder = HostRecorder(full=True)
    step(recorder, 0)
    step(recorder, 1)
    recorder.begin_step(2)
    assert recorder.events(0) == []
    assert len(recorder.events(1)) == 3
    assert len(recorder.rows()) == 2, "sums of it are known"


def test_numbers_may_come_again() -> None:
    """As where an older state of the training is loaded: the later step is meant."""
    recorder = HostRecorder(full=True)
    for number in (4, 5, 4):
        step(recorder, number)
    recorder.begin_step(5)
    row = recorder.rows()[-1]
    assert row.number == 4
    assert len(recorder.events(4)) == 3
    assert all(row.begin_ns <= begin for _, _, begin, _ in recorder.events(4))


# --- devices --------------------------------------------------------------------------------------


class Device:
    """A device whose clock is the host's but for `AHEAD_NS`; it has done what it was given up to `reached_ns`."""

    AHEAD_NS = 5_000_000_000
    reached_ns = 0
    late_ns = 0
    """How much later than the host it comes to what it is given."""

    def __init__(self, device: torch.device, *, enable_timing: bool) -> None:
        assert device.type == "cuda"
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "current"
        self.at_ns = time.perf_counter_ns() + Device.late_ns + Device.AHEAD_NS

    def query(self) -> bool:
        return self.at_ns <= Device.reached_ns

    def synchronize(self) -> None:
        Device.reached_ns = max(Device.reached_ns, self.at_ns)

    def elapsed_time(self, other: Device) -> float:
        assert self.query()
        assert other.query()
        return (other.at_ns - self.at_ns) / 1e6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> DeviceRecorder:
    monkeypatch.setattr(torch, "Event", Device)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "current")
    monkeypatch.setattr(Device, "reached_ns", 0)
    monkeypatch.setattr(Device, "late_ns", 0)
    return DeviceRecorder(torch.device("cuda", 0), full=True)


def test_what_a_device_has_not_done_is_told_later(gpu: DeviceRecorder) -> None:
    step(gpu, 0)
    gpu.begin_step(1)
    assert gpu.rows() == []
    Device.reached_ns = time.perf_counter_ns() + Device.AHEAD_NS
    step(gpu, 1)
    gpu.begin_step(2)
    assert [row.number for row in gpu.rows()] == [0], "nothing waits for the device"
    count, ns = gpu.rows()[0].sums[Doing.FORWARD, 0, 0]
    assert count == 2
    assert ns >= 4_000_000
    gpu.settle()
    assert [row.number for row in gpu.rows()] == [0, 1]


def test_numbers_of_steps_of_a_device_may_come_again(gpu: DeviceRecorder) -> None:
    for number in (4, 5, 4):
        step(gpu, number)
    gpu.begin_step(5)
    gpu.settle()
    assert [row.number for row in gpu.rows()] == [4, 5, 4]
    assert all(row.sums[Doing.FORWARD, 0, 0][1] >= 4_000_000 for row in gpu.rows())


def test_times_of_a_device_are_told_on_the_clock_of_the_host(gpu: DeviceRecorder) -> None:
    """By the step in which it was the least late."""
    begins, ends = [], []
    for number, late_ns in enumerate((3_000_000, 0, 8_000_000)):
        Device.late_ns = late_ns
        begins.append(time.perf_counter_ns() + late_ns)
        step(gpu, number)
        ends.append(time.perf_counter_ns() + late_ns)
    gpu.begin_step(3)
    gpu.settle()
    for number in range(3):
        events = gpu.events(number)
        assert len(events) == 3
        for doing, _, begin, end in events:
            if doing is Doing.FORWARD:
                assert begins[number] - 1_000_000 <= begin <= end <= ends[number] + 1_000_000


@pytest.mark.parametrize("full", [False, True])
def test_steps_that_nobody_waits_for_are_thinned_out(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_recorder, "THINNED", 4)
    recorder = HostRecorder(full=full)
    step(recorder, 0)
    recorder.begin_step(1)
    mark = recorder.begin()
    recorder.thin_out()
    recorder.end(Doing.FORWARD, 0, 0, F0, mark)
    recorder.count_step()
    for number in range(2, 10):
        step(recorder, number)
    recorder.begin_step(10)
    told = [row.number for row in recorder.rows()]
    assert told == ([*range(10)] if full else [0, 1, 4, 8]), "this step goes on, and one with all actions is all there"
    assert all(row.sums[Doing.FORWARD, 0, 0][0] for row in recorder.rows())
    recorder.forget()
    for number in range(11, 13):
        step(recorder, number)
    recorder.begin_step(13)
    assert [row.number for row in recorder.rows()] == [11, 12], "of another deployment"
