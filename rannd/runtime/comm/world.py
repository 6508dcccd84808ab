"""The ranks of a job: who this process is, on which device it computes, how it talks to the others.

A world is made once per process, at the first need. It adopts, in this order: a torch.distributed group that
the script has initialised, the environment of rannc-run or torchrun, and that of an MPI launcher. Alone in the
world, a process needs none of them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import psutil
import torch
import torch.distributed as dist

from rannd import log
from rannd.config import Config
from rannd.errors import LaunchError, StepError
from rannd.plan.deployment import Slot
from rannd.runtime.comm import network_interface
from rannd.runtime.failure.connections import Connections
from rannd.runtime.failure.detector import FailureDetector
from rannd.runtime.failure.nan_check import Finite

RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""Names of rank, size, local rank and local size of each kind of launcher.

Slurm's size is that of the step: the script of sbatch has a SLURM_PROCID and the job's SLURM_NTASKS, and is no rank.
"""

TIMEOUT = timedelta(minutes=30)

KNOCK_S = 60.0
"""How long a rank looks itself whether rank 0 listens, before it leaves that to torch."""
PAUSE_S = 0.01

LOCK_S = 0.1
"""How long Python's lock is free for gloo's threads at the end."""


@dataclass(frozen=True)
class LaunchedRank:
    """Rank and size as the launcher gives them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = ""


def find_place(environ: Mapping[str, str]) -> LaunchedRank:
    """Who this process is, without talking to anybody. LaunchError for variables that contradict each other."""
    if dist.is_available() and dist.is_initialized():
        local = environ.get("LOCAL_RANK") or environ.get("OMPI_COMM_WORLD_LOCAL_RANK")
        return LaunchedRank(dist.get_rank(), dist.get_world_size(), int(local or dist.get_rank()), "torch.distributed")
    for rank, size, local_rank, _ in RANK_VARIABLES:
        if rank in environ and size in environ:
            try:
                place = LaunchedRank(
                    int(environ[rank]), int(environ[size]), int(environ.get(local_rank, environ[rank])), rank
                )
            except ValueError as exc:
                raise LaunchError(
                    f"{rank}={environ[rank]!r}, {size}={environ[size]!r}: whole numbers are wanted"
                ) from exc
            if not 0 <= place.rank < place.size:
                raise LaunchError(f"{rank}={place.rank} is not below {size}={place.size}; start the job anew")
            return place
    return LaunchedRank()


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
    finite: Finite = field(default_factory=Finite)
    uncompared: list[tuple[int, float, bool]] = field(default_factory=list)
    """Backwards that the ranks have not compared yet: see `rannd.runtime.comm.lockstep.compare_later`."""
    uncached: bool = False
    """This rank has lost the daemon, and said so: it asks none any more."""

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
            with self.watch.inside("group"), self.watch.connections.recording():
                self.groups[slots] = dist.new_group(ranks, backend=_backend(self.device), timeout=TIMEOUT)
            self.watch.connections.add(self.groups[slots] if self.rank in ranks else None)
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
    place = find_place(os.environ)
    host = socket.gethostname()
    logger.info("RaNNC started on rank %d (%s)", place.rank, host)
    if place.launcher.startswith(("OMPI", "PMI")):
        _end_with_launcher()
    connections = Connections()
    if place.size > 1 and not dist.is_initialized():
        with connections.recording():
            _rendezvous(place)
    device = _device(config.device, place)
    if place.size == 1:
        ordinal = device.index or 0
        return World(
            place, device, (host,), (Slot(0, ordinal),), (0,), None, None, None, finite=Finite(config.check_nan)
        )
    with connections.recording():
        control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        forward = dist.new_group(backend=_backend(device), timeout=TIMEOUT)
        backward = dist.new_group(backend=_backend(device), timeout=TIMEOUT)
    for group in (control, forward, backward):
        connections.add(group)
    watch = FailureDetector(connections)
    world = World(place, device, (), (), (), control, forward, backward, watch=watch, finite=Finite(config.check_nan))
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


def _end_with_launcher() -> None:
    """Ranks outlive an mpirun that is killed, unless they ask the kernel for a signal at its end."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        chosen = ctypes.c_int(0)
        libc.prctl(2, ctypes.byref(chosen))  # PR_GET_PDEATHSIG: rannc-run has seen to it already
        if chosen.value == 0:
            libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _rendezvous(place: LaunchedRank) -> None:
    """Initialise torch.distributed: rannc-run and torchrun say where, under a bare mpirun rank 0 tells through MPI."""
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        address, port = _agree_through_mpi(place)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        name = network_interface.to_others(os.environ["MASTER_ADDR"])
        if name:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            log.get("RaNNCProcess").info("This machine's name leads to itself: others reach it by %s", name)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if place.rank:
        _await_listener(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    store = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group(backend, init_method=store, rank=place.rank, world_size=place.size, timeout=TIMEOUT)
    atexit.register(_leave)


def _await_listener(address: str, port: str) -> None:
    """Wait until rank 0 listens. torch would wait, too, but looks again after 0.1 to 0.6 s only."""
    deadline = time.monotonic() + KNOCK_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, int(port)), timeout=1.0).close()
            return
        except (socket.gaierror, ValueError):
            return  # torch says what is wrong with it
        except OSError:
            time.sleep(PAUSE_S)


def _leave() -> None:
    """Leave in a way that neither aborts this process nor ends others before it.

    gloo's threads drop the tensors of finished work a moment after the work is done, and need Python's lock for it;
    when Python is ending already, that aborts the process. So they get the lock once more, for a while. Closing the
    groups would wait for the threads, too, but it also cuts the other ranks off, which would then fail before a rank
    that is ending with an error. NCCL's communicators have to be closed.
    """
    if torch.cuda.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(LOCK_S)


def _agree_through_mpi(place: LaunchedRank) -> tuple[str, int]:
    """Address and free port of rank 0."""
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")  # its start takes a second
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.Get_size() != place.size:
        raise LaunchError(
            f"the launcher started {place.size} ranks, but MPI sees {world.Get_size()}: mpirun and the MPI library "
            "belong to different installations. Start the job with rannc-run, or with the mpirun of this Python "
            "environment"
        )
    told = None
    if place.rank == 0:
        host = socket.gethostname()
        try:
            address = socket.gethostbyname(host)
        except OSError:
            address = "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        told = f"{address} {port}".encode().ljust(128)
    buffer = bytearray(told or bytes(128))
    world.Bcast([buffer, MPI.BYTE], root=0)
    address, text = bytes(buffer).decode().split()
    return address, int(text)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _device(wanted: str, place: LaunchedRank) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise LaunchError("device=cuda, but torch sees no CUDA device; use device=cpu or a CUDA build of torch")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _node_identity() -> str:
    """Equal for processes on one machine, and for them alone (containers may share a machine's host name)."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{boot}/{socket.gethostname()}"


def device_memory(world: World) -> int:
    """Bytes of memory that belong to this rank: its GPU's, or its share of the node's (and its cgroup's)."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total // world.local_size


def device_model(world: World) -> str:
    """What kind of device this is, for keys of measured costs."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"cpu {_cpu_name()} {torch.get_num_threads()} threads"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return os.uname().machine
