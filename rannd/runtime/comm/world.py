"""The ranks of a job: who is there, on which devices, and the small messages among all of them.

A world is made once per process, at the first need: `rannd.runtime.comm.rendezvous` connects the ranks, here they
tell each other where they are.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist

from rannd import log
from rannd.config import Config
from rannd.errors import LaunchError, StepError
from rannd.plan.deployment import Slot
from rannd.runtime.comm import rendezvous
from rannd.runtime.comm.device import backend_of, choose_device
from rannd.runtime.comm.rendezvous import LaunchedRank
from rannd.runtime.failure.connections import Connections
from rannd.runtime.failure.detector import FailureDetector


@dataclass(frozen=True)
class Sum:
    """A sum over all ranks that is under way."""

    watch: FailureDetector
    everyone: torch.Tensor
    """What every rank gave, one row for each."""
    work: dist.Work | None

    def finish(self) -> torch.Tensor:
        """The sums, the same bits on all ranks. Waits for them."""
        if self.work is not None:
            with self.watch.inside("sum"):
                self.work.wait()
        return self.everyone.sum(0)


@dataclass
class World:
    """All ranks of the job. Collective methods have to be called by all of them, in the same order."""

    place: LaunchedRank
    device: torch.device
    hosts: tuple[str, ...]
    slots: tuple[Slot, ...]
    """Places of all ranks, sorted; a rank's *slot* is its position here."""
    rank_of_slot: tuple[int, ...]
    control: dist.ProcessGroup | None
    """gloo, for small messages on the CPU."""
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    watch: FailureDetector = field(default_factory=FailureDetector)
    """Failures of this rank and of others."""

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def slot(self) -> int:
        """This rank's slot."""
        return self.rank_of_slot.index(self.rank)

    @property
    def nodes(self) -> int:
        """How many nodes have ranks of this job."""
        return len({slot.node for slot in self.slots})

    @property
    def first_on_node(self) -> bool:
        """Whether this rank talks to its node's daemon: rank 0 does, and the first rank of each other node."""
        node = self.slots[self.slot].node
        there = [rank for rank, slot in zip(self.rank_of_slot, self.slots, strict=True) if slot.node == node]
        return self.rank == min(there)

    @property
    def local_size(self) -> int:
        """Ranks on this rank's node."""
        return sum(slot.node == self.slots[self.slot].node for slot in self.slots)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with self.watch.inside("barrier"):
                dist.barrier(group=self.control)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """`data` of rank `source`, on all ranks."""
        if self.size == 1:
            assert data is not None
            return data
        with self.watch.inside("broadcast"):
            length = torch.tensor([len(data) if data is not None else 0])
            dist.broadcast(length, source, group=self.control)
            buffer = torch.empty(int(length), dtype=torch.uint8)
            if self.rank == source and data:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if int(length):
                dist.broadcast(buffer, source, group=self.control)
            return buffer.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank."""
        if self.size == 1:
            return [data]
        lengths = self.gather_numbers([len(data)])
        widest = max(length for (length,) in lengths)
        buffer = torch.zeros(max(widest, 1), dtype=torch.uint8)
        if data:
            buffer[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        received = [torch.empty_like(buffer) for _ in range(self.size)]
        with self.watch.inside("gather"):
            dist.all_gather(received, buffer, group=self.control)
        return [part.numpy().tobytes()[:length] for part, (length,) in zip(received, lengths, strict=True)]

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The whole numbers that every rank gave (as many on each), by rank."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        with self.watch.inside("gather"):
            received, work = self._exchange(mine)
            work.wait()
        return received.tolist()

    def sum_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks of a few numbers on the CPU, in one dimension."""
        return self.begin_sum(numbers).finish()

    def begin_sum(self, numbers: torch.Tensor) -> Sum:
        """The same, while this rank goes on. Nothing else of `control` may begin before it is finished."""
        if self.size == 1:
            return Sum(self.watch, numbers.unsqueeze(0), None)
        with self.watch.inside("sum"):
            return Sum(self.watch, *self._exchange(numbers))

    def _exchange(self, numbers: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Begin to give a few numbers to every rank; (what comes of each, how to wait for it).

        Everybody sends to everybody at once. gloo's other collectives go around in rings, each step of which waits for
        a rank that sleeps: among four ranks on two cores they take 3 (all_gather) to 12 times (all_reduce) as long.
        """
        received = numbers.new_empty(self.size, numbers.numel())
        work = dist.all_to_all_single(received.view(-1), numbers.repeat(self.size), group=self.control, async_op=True)
        assert work is not None
        return received, work

    def group_of(self, slots: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of the ranks in some slots, for reductions; None for one slot alone. Collective when new."""
        if len(slots) < 2:
            return None
        if slots not in self.groups:
            ranks = sorted(self.rank_of_slot[slot] for slot in slots)
            with self.watch.inside("group"):
                self.groups[slots] = rendezvous.make_group(self.watch.connections, backend_of(self.device), ranks)
        return self.groups[slots]


def finish(work: dist.Work | None) -> None:
    """Wait for a transfer. torch gives none to ranks outside of the group, which is a mistake of the caller."""
    if work is None:
        raise StepError("a transfer was asked for outside of its group; please report this")
    work.wait()


_world: World | None = None


def current(config: Config) -> World:
    """The world of this process, made at the first call (collective then)."""
    global _world
    if _world is None:
        _world = _make(config)
    return _world


def made() -> World | None:
    """The world of this process, if there is one yet."""
    return _world


def _make(config: Config) -> World:
    logger = log.get("RaNNCProcess")
    place = rendezvous.find_place(os.environ)
    host = socket.gethostname()
    logger.info("RaNNC started on rank %d (%s)", place.rank, host)
    connections = Connections()
    rendezvous.join(place, connections)
    device = choose_device(config.device, place.local_rank)
    if place.size == 1:
        return World(place, device, (host,), (Slot(0, device.index or 0),), (0,), None, None, None)
    control, forward, backward = (
        rendezvous.make_group(connections, backend) for backend in ("gloo", backend_of(device), backend_of(device))
    )
    watch = FailureDetector(connections)
    world = World(place, device, (), (), (), control, forward, backward, watch=watch)
    mine = (host, _node_identity(), device.type, device.index if device.index is not None else place.local_rank)
    everyone = [
        msgspec.msgpack.decode(data, type=tuple[str, str, str, int])
        for data in world.gather_bytes(msgspec.msgpack.encode(mine))
    ]
    kinds = {kind for _, _, kind, _ in everyone}
    if len(kinds) > 1:
        raise LaunchError(
            f"ranks use different kinds of devices ({', '.join(sorted(kinds))}); set device= on all of them"
        )
    nodes: dict[str, int] = {}
    slots = []
    for _, node, _, ordinal in everyone:
        slots.append(Slot(nodes.setdefault(node, len(nodes)), ordinal))
    if len(set(slots)) < len(slots):
        raise LaunchError(
            f"two ranks share a device ({[(s.node, s.device) for s in slots]}); start at most one rank per device"
        )
    order = sorted(range(place.size), key=lambda rank: slots[rank])
    world.hosts = tuple(h for h, _, _, _ in everyone)
    world.rank_of_slot = tuple(order)
    world.slots = tuple(slots[rank] for rank in order)
    watchdog_s = config.watchdog_timeout_s if config.run_watchdog else 0.0
    watch.start(place.rank, world.hosts, len(nodes) == 1, world.broadcast_bytes, watchdog_s)
    if place.rank == 0 and device.type == "cuda":
        logger.info("CUDA device assignments:")
        for rank in range(place.size):
            logger.info(" Worker %d: device%d@%s", rank, slots[rank].device, world.hosts[rank])
    return world


def _node_identity() -> str:
    """Equal for processes on one machine, and for them alone (containers may share a machine's host name)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{boot}/{socket.gethostname()}"
