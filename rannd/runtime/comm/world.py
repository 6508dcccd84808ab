"""The `World`: all ranks of a job with their devices and process groups, and collectives on small values.

There is one per process, created when it is first needed: `rannd.runtime.comm.rendezvous` connects the ranks, which
then exchange their hosts and devices here.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist

from rannd import log
from rannd.config import Config
from rannd.device.action_clock import ActionClock
from rannd.device.identity import choose_device, device_identity, is_accelerator
from rannd.device.memory_beside import bytes_beside
from rannd.device.reads import LateReads
from rannd.device.streams import Issued
from rannd.errors import UsageError
from rannd.plan.deployment import Slot
from rannd.ranks import open_files
from rannd.ranks.core_count import core_count
from rannd.ranks.host_name import host_name
from rannd.runtime.comm import rendezvous
from rannd.runtime.comm.rank_devices import RankDevice, node_identity, slots_of
from rannd.runtime.comm.rendezvous import LaunchedRank
from rannd.runtime.failure.connections import Connections
from rannd.runtime.failure.detector import FailureDetector
from rannd.runtime.transport import host_wait
from rannd.runtime.transport.choice import group_backend, make_transport, transport_name
from rannd.runtime.transport.transport import Pair, Transport, pair
from rannd.units import amount

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
                host_wait.wait(self.work)
        return self.everyone.sum(0)


@dataclass(frozen=True)
class Gathering:
    """An asynchronous all-gather of integers."""

    watch: FailureDetector
    everyone: torch.Tensor
    """Numbers of all ranks, one row per rank."""
    work: dist.Work | None

    def is_ready(self) -> bool:
        """Whether the numbers of all ranks are there."""
        return self.work is None or self.work.is_completed()

    def finish(self) -> list[list[int]]:
        """Wait for the numbers and return them by rank."""
        if self.work is not None:
            with self.watch.inside("gather"):
                host_wait.wait(self.work)
        found: list[list[int]] = self.everyone.tolist()
        return found


_NODE = "node"
"""The group of a node's ranks, among `World.groups_beside`."""


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
    """Group of all ranks for tensors of the device."""
    transport: Transport
    """How values and gradients get to other ranks."""
    mates: tuple[int, ...] = ()
    """Ranks that have this rank's accelerator (on the CPU: its node), this one among them."""
    communicator_bytes: int | None = None
    """Bytes of the device that a communicator of two ranks takes, of those opened last; None: none was opened."""
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    groups_beside: dict[str, dist.ProcessGroup | None] = field(default_factory=dict)
    """Those of threads that communicate while the script goes on, by what they do."""
    watch: FailureDetector = field(default_factory=FailureDetector)
    """Failure detector of this rank."""
    reads: LateReads = field(init=False)
    """Values of the device that the host uses."""
    issued: Issued = field(init=False)
    """What calls of models have given the device."""
    clock: ActionClock | None = None
    """Times of this rank's actions; None: they are not measured."""

    def __post_init__(self) -> None:
        intact = self.watch.ensure_intact
        self.reads = LateReads(self.device, late=self.transport.reads_late, ensure_intact=intact)
        self.issued = Issued(self.device)
        self.watch.outstanding = self.issued.is_outstanding

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
        return self.rank == min(self.ranks_here)

    @property
    def ranks_here(self) -> list[int]:
        """The ranks of this rank's node, itself among them."""
        return self._ranks_on(self.slots[self.slot].node)

    def _ranks_on(self, node: int) -> list[int]:
        return sorted(rank for rank, slot in zip(self.rank_of_slot, self.slots, strict=True) if slot.node == node)

    @property
    def local_size(self) -> int:
        """Number of ranks on this rank's node."""
        return sum(slot.node == self.slots[self.slot].node for slot in self.slots)

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            with self.watch.inside("barrier"):
                dist.barrier(group=self.control)

    def meet_on_node(self) -> None:
        """Wait for the other ranks of this node. Collective over all ranks in the first call."""
        if self.nodes == 1:
            self.barrier()
            return
        if _NODE not in self.groups_beside:
            found: dist.ProcessGroup | None = None
            for node in sorted({slot.node for slot in self.slots}):
                ranks = self._ranks_on(node)
                with self.watch.inside("group"):
                    made = rendezvous.make_group(self.watch.connections, "gloo", ranks) if len(ranks) > 1 else None
                found = made if self.rank in ranks else found
            self.groups_beside[_NODE] = found
        if self.groups_beside[_NODE] is not None:
            with self.watch.inside("barrier"):
                dist.barrier(group=self.groups_beside[_NODE])

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
        return [list(numbers)] if self.size == 1 else self.begin_gather(numbers).finish()

    def begin_gather(self, numbers: Sequence[int]) -> Gathering:
        """Start `gather_numbers` asynchronously. No other collective on `control` may start before it has finished."""
        mine = torch.tensor(list(numbers), dtype=torch.int64)
        if self.size == 1:
            return Gathering(self.watch, mine.unsqueeze(0), None)
        with self.watch.inside("gather"):
            return Gathering(self.watch, *self._exchange(mine))

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
        given = torch.cat((numbers,) * self.size)
        work = dist.all_to_all_single(received.view(-1), given, group=self.control, async_op=True)
        assert work is not None
        return received, work

    def share_values(self, values: torch.Tensor) -> torch.Tensor:
        """All-gather a few numbers of the device, which the host does not wait for.

        Args:
            values: One-dimensional, equally long on all ranks.

        Returns:
            Their values on all ranks, one row per rank.
        """
        if self.size == 1:
            return values.unsqueeze(0)
        everyone = values.new_zeros(self.size, values.numel())
        everyone[self.rank] = values
        with self.watch.inside("sum"):
            dist.all_reduce(everyone, group=self.forward)  # gloo gathers no tensors of GPUs
        return everyone

    def open(self, pairs: Iterable[Pair]) -> None:
        """Connect pairs of slots for the transfers of a graph. Collective over all ranks, with the same pairs."""
        begin, before = time.monotonic(), bytes_beside(self.device)
        ranks = {pair(gradients, self.rank_of_slot[one], self.rank_of_slot[other]) for gradients, one, other in pairs}
        with self.watch.inside("group"):
            count = self.transport.open(ranks)
        if not count:
            return
        mine = sum(self.rank in each[1:] for each in ranks)
        taken = max(bytes_beside(self.device) - before, 0)
        if mine and count == len(ranks):  # none of them was there before
            self.communicator_bytes = taken // mine
        if self.rank == 0:
            seconds = time.monotonic() - begin
            log.get("RaNNCProcess").log(
                log.DETAIL, "Opened %d communicators in %.1f s, %s of this device", count, seconds, amount(taken)
            )

    def beside(self, call: str) -> World:
        """The same ranks with another group for messages, which a thread may use beside the script.

        Collective when it is new; `call`: what the thread does.
        """
        if self.size == 1:
            return self
        if call not in self.groups_beside:
            with self.watch.inside("group"):
                self.groups_beside[call] = rendezvous.make_group(self.watch.connections, "gloo")
        other = copy.copy(self)  # what was given to the device is counted once
        other.control = self.groups_beside[call]
        return other

    def group_of(self, slots: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Process group of the ranks of some slots, for reductions; None for a single slot.

        Collective over all ranks if the group does not exist yet. It is used once then: NCCL makes a communicator at
        the first use, for which the hosts of all its ranks have to meet.
        """
        if len(slots) < 2:
            return None
        if slots not in self.groups:
            ranks = sorted(self.rank_of_slot[slot] for slot in slots)
            with self.watch.inside("group"):
                made = rendezvous.make_group(self.watch.connections, self.transport.backend, ranks)
                if self.rank in ranks and is_accelerator(self.device):
                    dist.all_reduce(torch.zeros(1, device=self.device), group=made)
                self.groups[slots] = made
        return self.groups[slots]


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
    name = transport_name(config.transport, device)
    make_group = functools.partial(rendezvous.make_group, connections)
    if place.size == 1:
        alone = make_transport(name, device, 0, None, make_group)
        return World(place, device, (host,), (Slot(0, device.index or 0),), (0,), None, None, alone, mates=(0,))
    control, forward = make_group("gloo"), make_group(group_backend(name))
    transport = make_transport(name, device, place.rank, forward, make_group)
    world = World(place, device, (), (), (), control, forward, transport, watch=watch)
    index = device.index if device.index is not None else place.local_rank
    cores = sorted(os.sched_getaffinity(0))
    mine = RankDevice(host, node_identity(), device.type, index, device_identity(device), name, cores)
    everyone = [
        msgspec.msgpack.decode(data, type=RankDevice) for data in world.gather_bytes(msgspec.msgpack.encode(mine))
    ]
    free = core_count() == len(cores)  # a container's quota is for all of its threads together
    host_wait.poll(free and host_wait.suffices(cores, (each.cores for each in everyone if each.node == mine.node)))
    slots = slots_of(everyone, shared=transport.shares_devices)
    if is_accelerator(device):  # NCCL makes a communicator at the first use, for which the hosts have to meet
        dist.all_reduce(torch.zeros(1, device=device), group=forward)
    order = sorted(range(place.size), key=lambda rank: slots[rank])
    nodes = {slot.node for slot in slots}
    world.hosts = tuple(each.host for each in everyone)
    world.rank_of_slot = tuple(order)
    world.slots = tuple(slots[rank] for rank in order)
    here = (mine.node, mine.identity)
    world.mates = tuple(rank for rank, each in enumerate(everyone) if (each.node, each.identity) == here)
    watchdog_s = config.watchdog_timeout_s if config.run_watchdog else 0.0
    watch.where.ranks = world.rank_of_slot
    watch.start(place.rank, world.hosts, len(nodes) == 1, world.broadcast_bytes, watchdog_s)
    if place.rank == 0 and is_accelerator(device):
        logger.log(log.DETAIL, "CUDA device assignments:")
        for rank in range(place.size):
            logger.log(log.DETAIL, " Worker %d: device%d@%s", rank, everyone[rank].index, world.hosts[rank])
    return world
