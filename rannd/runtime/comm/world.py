"""The `World`: all ranks of a job with their devices and process groups, and collectives on small values.

There is one per process, created when it is first needed: `rannd.runtime.comm.rendezvous` connects the ranks, which
then exchange their hosts and devices here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist

from rannd import log, open_files
from rannd.config import Config
from rannd.errors import LaunchError, StepError, UsageError
from rannd.host_name import host_name
from rannd.plan.deployment import Slot
from rannd.runtime.comm import rendezvous
from rannd.runtime.comm.device import backend_of, choose_device
from rannd.runtime.comm.rendezvous import LaunchedRank
from rannd.runtime.failure.connections import Connections
from rannd.runtime.failure.detector import FailureDetector

FILES_PER_RANK, OTHER_FILES = 9, 128
"""Open files of rank 0: connections of its process groups, failure reports and the store to each rank; and beside."""


@dataclass(frozen=True)
class Sum:
    """An asynchronous sum over all ranks."""

    watch: FailureDetector
    everyone: torch.Tensor
    """Numbers of all ranks, one row per rank."""
    work: dist.Work | None

    def finish(self) -> torch.Tensor:
        """Wait for the sums and return them, bitwise equal on all ranks."""
        if self.work is not None:
            with self.watch.inside("sum"):
                self.work.wait()
        return self.everyone.sum(0)


@dataclass
class World:
    """All ranks of the job. Collective methods have to be called on all ranks in the same order."""

    place: LaunchedRank
    device: torch.device
    hosts: tuple[str, ...]
    slots: tuple[Slot, ...]
    """(node, device) of all ranks, sorted; a rank's *slot* is its index in this tuple."""
    rank_of_slot: tuple[int, ...]
    control: dist.ProcessGroup | None
    """gloo group for small messages on the CPU."""
    forward: dist.ProcessGroup | None
    backward: dist.ProcessGroup | None
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    watch: FailureDetector = field(default_factory=FailureDetector)
    """Failure detector of this rank."""

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
        """Number of nodes of this job."""
        return len({slot.node for slot in self.slots})

    @property
    def first_on_node(self) -> bool:
        """Whether this is the lowest rank of its node; it connects to the node's daemon."""
        node = self.slots[self.slot].node
        there = [rank for rank, slot in zip(self.rank_of_slot, self.slots, strict=True) if slot.node == node]
        return self.rank == min(there)

    @property
    def local_size(self) -> int:
        """Number of ranks on this rank's node."""
        return sum(slot.node == self.slots[self.slot].node for slot in self.slots)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with self.watch.inside("barrier"):
                dist.barrier(group=self.control)

    def broadcast_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Broadcast `data` of rank `source`."""
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
        """All-gather byte strings; returns them by rank."""
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
        """All-gather integers, equally many on all ranks; returns them by rank."""
        if self.size == 1:
            return [list(numbers)]
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        with self.watch.inside("gather"):
            received, work = self._exchange(mine)
            work.wait()
        return received.tolist()

    def sum_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Sum a one-dimensional CPU tensor of few numbers over all ranks."""
        return self.begin_sum(numbers).finish()

    def begin_sum(self, numbers: torch.Tensor) -> Sum:
        """Start `sum_numbers` asynchronously. No other collective on `control` may start before it has finished."""
        if self.size == 1:
            return Sum(self.watch, numbers.unsqueeze(0), None)
        with self.watch.inside("sum"):
            return Sum(self.watch, *self._exchange(numbers))

    def _exchange(self, numbers: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        """Start an all-gather of a few numbers; returns the receive buffer and the work to wait for.

        Uses all_to_all, in which every rank sends to every other at once. gloo's other collectives use rings, in which
        each step waits for a rank that may be sleeping: with four ranks on two cores they take 3 (all_gather) to 12
        times (all_reduce) as long.
        """
        if not dist.is_initialized():
            raise UsageError(
                "destroy_process_group() has ended the communication between the ranks, which all functions of rannd "
                "need; call it after the last of them (model.state_dict, save_checkpoint, the last step)"
            )
        received = numbers.new_empty(self.size, numbers.numel())
        work = dist.all_to_all_single(received.view(-1), numbers.repeat(self.size), group=self.control, async_op=True)
        assert work is not None
        return received, work

    def group_of(self, slots: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Process group of the ranks of some slots, for reductions; None for a single slot.

        Collective over all ranks if the group does not exist yet.
        """
        if len(slots) < 2:
            return None
        if slots not in self.groups:
            ranks = sorted(self.rank_of_slot[slot] for slot in slots)
            with self.watch.inside("group"):
                self.groups[slots] = rendezvous.make_group(self.watch.connections, backend_of(self.device), ranks)
        return self.groups[slots]


def finish(work: dist.Work | None) -> None:
    """Wait for a transfer. torch returns None on ranks outside the group, which would be a bug of the caller."""
    if work is None:
        raise StepError("internal error: a transfer was started on a rank outside its group; please report this")
    work.wait()


_world: World | None = None


def current(config: Config) -> World:
    """World of this process, created in the first call, which is collective."""
    global _world
    if _world is None:
        _world = _make(config)
    return _world


def made() -> World | None:
    """World of this process; None if `current` was not called yet."""
    return _world


def _make(config: Config) -> World:
    logger = log.get("RaNNCProcess")
    place = rendezvous.find_place(os.environ)
    host = host_name()
    logger.log(log.DETAIL, "RaNNC started on rank %d (%s)", place.rank, host)
    connections = Connections()
    watch = FailureDetector(connections)
    if place.size > 1:
        watch.await_ranks(place.rank, place.size, config.wait_notice_s)
        few = open_files.make_room(FILES_PER_RANK * place.size + OTHER_FILES, f"connections to {place.size} ranks")
        if few and place.local_rank == 0:
            logger.warning("%s", few)
    rendezvous.join(place, connections)
    device = choose_device(config.device, place.local_rank)
    if place.size == 1:
        return World(place, device, (host,), (Slot(0, device.index or 0),), (0,), None, None, None)
    control, forward, backward = (
        rendezvous.make_group(connections, backend) for backend in ("gloo", backend_of(device), backend_of(device))
    )
    world = World(place, device, (), (), (), control, forward, backward, watch=watch)
    mine = (host, _node_identity(), device.type, device.index if device.index is not None else place.local_rank)
    everyone = [
        msgspec.msgpack.decode(data, type=tuple[str, str, str, int])
        for data in world.gather_bytes(msgspec.msgpack.encode(mine))
    ]
    kinds = {kind for _, _, kind, _ in everyone}
    if len(kinds) > 1:
        raise LaunchError(
            f"ranks use different kinds of devices ({', '.join(sorted(kinds))}); set device= to the same on all ranks"
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
        logger.log(log.DETAIL, "CUDA device assignments:")
        for rank in range(place.size):
            logger.log(log.DETAIL, " Worker %d: device%d@%s", rank, slots[rank].device, world.hosts[rank])
    return world


def _node_identity() -> str:
    """Identifier of this machine: boot ID and host name, because containers may share a machine's host name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{boot}/{host_name()}"
