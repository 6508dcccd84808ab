"""What a plan may fill of a device: of one that is not there, and of what ranks tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from rannd.plan.deployment import Slot
from rannd.runtime.comm import world
from rannd.runtime.comm.rendezvous import LaunchedRank
from rannd.runtime.comm.world import World
from rannd.runtime.planning import memory_fit, tensor_memory
from rannd.runtime.planning.tensor_memory import COMMUNICATORS, STEPS, memory_for_tensors, neighbours, share
from rannd.runtime.transport.transport import Pair

GIB, MIB = 1 << 30, 1 << 20
TOTAL = 64 * GIB


def test_what_is_in_use_is_subtracted_in_steps() -> None:
    step = TOTAL // STEPS
    assert share(TOTAL, 0, 0, ranks=1) == TOTAL
    assert share(TOTAL, 1, 0, ranks=1) == TOTAL - step
    assert share(TOTAL, 700 * MIB, 300 * MIB, ranks=1) == TOTAL - step
    assert share(TOTAL, 700 * MIB, 400 * MIB, ranks=1) == TOTAL - 2 * step
    assert share(TOTAL, 800 * MIB, 30 * MIB, ranks=2) == TOTAL // 2 - step // 2, "each rank's own, and half of the rest"
    assert share(TOTAL, TOTAL + GIB, 0, ranks=1) == step, "others have it all"


@pytest.mark.parametrize("size", range(1, 8))
def test_each_slot_is_connected_once(size: int) -> None:
    pairs = neighbours(size, gradients=True)
    assert all(gradients and 0 <= low == high - 1 < size - 1 for gradients, low, high in pairs)
    assert {slot for _, *both in pairs for slot in both} == set(range(size if size > 1 else 0))
    assert len(pairs) == (size + 1) // 2 if size > 1 else not pairs


@dataclass
class Device:
    """A device with 64 GiB, as one of its processes sees it."""

    beside: int
    """Contexts and other processes."""
    reserved: dict[int, int]
    """By rank: what its allocator holds."""
    opened: int = 0


@dataclass
class Ranks:
    """The `World` of rank 0 of some ranks on one device or several."""

    there: Device
    size: int
    mates: tuple[int, ...]
    others: list[int] = field(default_factory=list)
    """What the other ranks measure."""
    device: torch.device = field(default_factory=lambda: torch.device("cuda", 0))
    local_size: int = 1
    communicator_bytes: int | None = None

    def open(self, pairs: set[Any]) -> None:
        if pairs:
            self.there.opened += 1
            self.there.beside += 300 * MIB if self.there.opened == 1 else 50 * MIB
            self.communicator_bytes = 300 * MIB if self.there.opened == 1 else 50 * MIB

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        if numbers == [self.there.reserved[0]]:
            return [[self.there.reserved[rank]] for rank in range(self.size)]
        return [numbers, *([each] for each in self.others)]

    def barrier(self) -> None:
        pass


def room(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> int:
    there = ranks.there
    held = lambda: sum(there.reserved[rank] for rank in ranks.mates)  # noqa: E731
    monkeypatch.setattr(tensor_memory, "load_libraries", lambda device, convolutions: 40 * MIB)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (TOTAL - there.beside - held(), TOTAL))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: there.reserved[0])
    return memory_for_tensors(cast(World, ranks), convolutions=False)


def test_one_rank_has_what_its_context_and_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(Device(beside=500 * MIB, reserved={0: 5 * GIB}), 1, (0,))
    assert room(monkeypatch, ranks) == TOTAL - GIB
    ranks.there.beside += 10 * GIB  # another process
    assert room(monkeypatch, ranks) == TOTAL - 11 * GIB
    assert ranks.there.opened == 0


def test_communicators_of_the_plan_are_there_before_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(Device(beside=500 * MIB, reserved={0: 2 * GIB, 1: 3 * GIB}), 2, (0,), others=[TOTAL])
    used = 500 + 300 + 50 + 40 + COMMUNICATORS * 50  # MiB
    assert room(monkeypatch, ranks) == share(TOTAL, used * MIB, 0, ranks=1) == TOTAL - 2 * GIB
    assert ranks.there.opened == 2, "the first one also loads NCCL"
    assert room(monkeypatch, ranks) == TOTAL - 2 * GIB, "a second plan finds the same"
    assert ranks.there.opened == 2
    ranks.others = [TOTAL - 7 * GIB]
    assert room(monkeypatch, ranks) == TOTAL - 7 * GIB, "the least of all ranks"


def test_ranks_of_one_device_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(Device(beside=1000 * MIB, reserved={0: 2 * GIB, 1: 30 * GIB}), 2, (0, 1), others=[TOTAL])
    monkeypatch.setattr(ranks, "open", lambda pairs: None)  # as over the host's memory
    assert room(monkeypatch, ranks) == (TOTAL - 2 * GIB) // 2, "what the other rank's allocator holds is for tensors"


class Opening:
    """A transport whose communicators take 20 MiB each, and NCCL itself 200 MiB."""

    reads_late = True

    def __init__(self) -> None:
        self.pairs: set[Pair] = set()
        self.beside = 0

    def open(self, pairs: set[Pair]) -> int:
        new = pairs - self.pairs
        self.beside += (200 * MIB if not self.pairs else 0) + 20 * MIB * sum(0 in each[1:] for each in new)
        self.pairs |= new
        return len(new)


def test_what_a_communicator_takes_is_measured_where_one_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Opening()
    monkeypatch.setattr(world, "bytes_beside", lambda device: transport.beside)
    place = LaunchedRank(0, 3, 0)
    slots = tuple(Slot(0, device) for device in range(3))
    made = World(place, torch.device("cuda", 0), ("host",) * 3, slots, (0, 1, 2), None, None, cast(Any, transport))
    assert made.communicator_bytes is None
    made.open({(False, 0, 1)})
    assert made.communicator_bytes == 220 * MIB
    made.open({(True, 0, 1)})
    assert made.communicator_bytes == 20 * MIB
    made.open({(False, 0, 2), (True, 0, 2), (False, 1, 2)})
    assert made.communicator_bytes == 20 * MIB, "two of the three are this rank's"
    transport.beside = 0
    made.open({(True, 1, 2)})
    made.open({(True, 1, 2)})
    assert made.communicator_bytes == 20 * MIB, "none of them is"


def test_ranks_of_one_device_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_fit, "free_memory", lambda device: (9 * GIB, TOTAL))
    for mates, free in (((0,), 9 * GIB), ((0, 1, 2), 3 * GIB)):
        ranks = Ranks(Device(0, {}), len(mates), mates)
        assert memory_fit.room(cast(World, ranks), torch.nn.Linear(2, 2)) == free, "the model is on the CPU"
