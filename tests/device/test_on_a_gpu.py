"""The device room on a GPU: what nothing else can show."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from rannd.device import generators, identity, memory, streams
from rannd.device.action_clock import ActionClock, Timed
from rannd.runtime.transport.staged_transport import StagedTransport

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
SIZE = 1 << 26
"""Elements of a tensor on which an operation takes the device longer than the host takes to issue the next ones."""
ASK = (
    "import torch; from rannd.device import identity; "
    "print('known as', identity.device_identity(identity.choose_device('auto', 3)))"
)


def _slowly(total: torch.Tensor, times: int = 20) -> None:
    """Queue additions of 1 to a tensor of zeros."""
    for _ in range(times):
        total += 1


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_is_chosen(wanted: str) -> None:
    assert identity.choose_device(wanted, 0) == CUDA
    assert identity.device_model(CUDA)


def test_a_gpu_is_the_same_under_any_name() -> None:
    """By index, by UUID, and by default."""
    known = identity.device_identity(CUDA)
    assert re.fullmatch(r"(MIG|GPU)?-?[0-9a-f-]{36}", known)
    if known.startswith("MIG"):
        return
    for visible in ("0", f"GPU-{known.removeprefix('GPU-')}"):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        told = subprocess.run([sys.executable, "-c", ASK], env=environment, capture_output=True, text=True, check=True)
        assert f"known as {known}" in told.stdout


def test_a_side_stream_waits_for_marks() -> None:
    side, total = streams.SideStream(CUDA), torch.zeros(SIZE, device=CUDA)
    _slowly(total)
    mark = side.mark()
    with side.inside():
        side.wait_for(mark)
        copy = total.clone()
    side.lend(copy)
    streams.synchronize(CUDA)
    assert bool((copy == 20).all())


def test_a_side_stream_does_not_wait_without_a_mark() -> None:
    side, total = streams.SideStream(CUDA), torch.zeros(SIZE, device=CUDA)
    streams.synchronize(CUDA)
    _slowly(total, 200)
    with side.inside():
        made = torch.ones(1, device=CUDA)
        done = torch.accelerator.current_stream(CUDA).record_event()
    done.synchronize()
    assert not torch.accelerator.current_stream(CUDA).query(), "the computations had ended before the side stream"
    assert made.item() == 1


def test_memory_of_a_side_stream_that_is_lent_is_not_used_again_too_early() -> None:
    side, total = streams.SideStream(CUDA), torch.zeros(SIZE, device=CUDA)
    with side.inside():
        buffer = torch.full((SIZE,), 3.0, device=CUDA)
        mark = torch.accelerator.current_stream(CUDA).record_event()
    torch.accelerator.current_stream(CUDA).wait_event(mark)
    side.lend(buffer)
    _slowly(total)
    total += buffer
    del buffer
    with side.inside():
        other = torch.full((SIZE,), 1000.0, device=CUDA)
    streams.synchronize(CUDA)
    assert bool((total == 23).all())
    assert bool((other == 1000).all())


def test_what_was_given_is_outstanding_until_it_is_done() -> None:
    issued, total = streams.Issued(CUDA), torch.zeros(SIZE, device=CUDA)
    streams.synchronize(CUDA)
    assert not issued.is_outstanding()
    _slowly(total, 200)
    issued.note()
    assert issued.is_outstanding(), "the computations had ended before they were asked for"
    streams.synchronize(CUDA)
    assert not issued.is_outstanding()


def test_generators_are_kept_and_seeded() -> None:
    generators.prepare(CUDA)
    assert generators.devices_in_use()[0] == CUDA
    states = generators.generator_states()
    with generators.kept_generators([CUDA]):
        generators.seed_all(3)
        first = torch.rand(4, device=CUDA), torch.rand(4)
        generators.seed_all(3)
        again = torch.rand(4, device=CUDA), torch.rand(4)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])
    kept = generators.generator_states()
    assert all(torch.equal(*pair) for pair in zip(states, kept, strict=True))
    own = generators.generator_state(CUDA)
    assert own is not None
    drawn = torch.rand(4, device=CUDA)
    generators.set_generator_state(CUDA, own)
    assert torch.equal(torch.rand(4, device=CUDA), drawn)


def test_memory_that_the_allocator_holds_counts_as_free() -> None:
    size = 1 << 30
    memory.release_unused(CUDA)
    free, total = memory.free_memory(CUDA)
    assert 0 < free <= total <= memory.device_memory(CUDA, 1)
    held = torch.empty(size, dtype=torch.uint8, device=CUDA)
    used = free - memory.free_memory(CUDA)[0]
    assert abs(used - size) < size // 10
    del held
    assert abs(memory.free_memory(CUDA)[0] - free) < size // 10
    assert torch.accelerator.memory_reserved(CUDA) >= size
    memory.release_unused(CUDA)
    assert torch.accelerator.memory_reserved(CUDA) < size


def test_what_is_staged_is_pinned_and_has_been_computed() -> None:
    transport, total = StagedTransport(CUDA, None, None), torch.zeros(SIZE, device=CUDA)
    _slowly(total)
    message = total.view(torch.uint8)
    copy = transport._staging(message.numel())
    assert copy.is_pinned()
    copy.copy_(message)
    assert bool((copy.view(torch.float32) == 20).all())


def test_actions_are_timed_without_waiting_for_them() -> None:
    clock, total = ActionClock(CUDA), torch.zeros(SIZE, device=CUDA)
    streams.synchronize(CUDA)
    clock.expect(10.0, 20.0)
    with clock:
        _slowly(total, 200)
    assert clock.take() == Timed(), "the device had ended before the host asked"
    streams.synchronize(CUDA)
    measured_us, *expected = clock.take()
    assert measured_us > 1000
    assert expected == [10.0, 20.0]
