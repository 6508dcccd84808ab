"""Initialises torch.distributed: reads this process's rank from the launcher's environment and creates process groups.

Sources of rank and world size, in this order: a process group that the script has already initialised, and the
environment variables of MPI launchers, rannc-run, torchrun and Slurm. A process without any of them is the only rank.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from rannd.device.identity import has_accelerator
from rannd.errors import LaunchError, UsageError
from rannd.ranks.rank_variables import PMIX, WORLDS, without_size
from rannd.runtime.comm import default_group, network_interface
from rannd.runtime.failure.connections import Connections

TIMEOUT = timedelta(minutes=30)

KNOCK_S = 60.0
"""Seconds that a rank itself polls whether rank 0 listens, before torch waits for it."""
PAUSE_S = 0.01

RANK_PROCESS = "RANND_RANK_PROCESS"
"""Variable with the process id of a rank, which processes that it starts inherit."""

LOCK_S = 0.1
"""Seconds for which the GIL is released for gloo's threads at exit."""


@dataclass(frozen=True)
class LaunchedRank:
    """Rank and world size as set by the launcher."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    launcher: str = ""


def find_place(environ: Mapping[str, str]) -> LaunchedRank:
    """Determine this process's rank without communication. LaunchError: variables disagree, or no size."""
    if dist.is_available() and dist.is_initialized():
        local = environ.get("LOCAL_RANK") or environ.get("OMPI_COMM_WORLD_LOCAL_RANK")
        return LaunchedRank(dist.get_rank(), dist.get_world_size(), int(local or dist.get_rank()), "torch.distributed")
    for rank, size, local_rank, _ in WORLDS:
        if rank in environ and size in environ:
            try:
                place = LaunchedRank(
                    int(environ[rank]), int(environ[size]), int(environ.get(local_rank, environ[rank])), rank
                )
            except ValueError as exc:
                raise LaunchError(
                    f"{rank}={environ[rank]!r}, {size}={environ[size]!r}: both have to be integers"
                ) from exc
            if not 0 <= place.rank < place.size:
                raise LaunchError(
                    f"{rank}={place.rank} has to be at least 0 and less than {size}={place.size}; start the job again"
                )
            return place
    if PMIX in environ:
        raise LaunchError(without_size(environ[PMIX]))
    return LaunchedRank()


def join(place: LaunchedRank, connections: Connections) -> None:
    """Initialise torch.distributed, unless the script has done so or no launcher has started it. Collective.

    A single rank of a launcher gets a process group of its own, so that a script runs alike on any number of ranks.
    UsageError in a process that a rank has started.
    """
    if place.launcher:
        _note_rank(place)
    if place.launcher.startswith(("OMPI", "PMI")):
        _end_with_launcher()
    if place.size > 1:
        if not dist.is_initialized():
            with connections.recording():
                _initialise(place)
        network_interface.tell()
        atexit.register(_leave)
    elif place.launcher and not dist.is_initialized():
        backend = _backend()
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)
        default_group.share(backend)
        atexit.register(_leave_alone)


def _note_rank(place: LaunchedRank) -> None:
    """Let processes that this rank starts know that it is one. UsageError in one that multiprocessing has started."""
    rank = os.environ.get(RANK_PROCESS, "")
    if rank not in ("", str(os.getpid())) and "__mp_main__" in sys.modules:  # multiprocessing's name of the script
        raise UsageError(
            f"a process that rank {place.rank} has started with multiprocessing, such as a worker of a DataLoader, "
            "runs the script again, which makes it a rank a second time; put what the script does below "
            '`if __name__ == "__main__":`'
        )
    os.environ[RANK_PROCESS] = str(os.getpid())


def make_group(connections: Connections, backend: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup | None:
    """Create a process group of some ranks, or of all. Collective over all ranks; non-members get no usable group."""
    with connections.recording():
        group = dist.new_group(ranks, backend=backend, timeout=TIMEOUT)
    connections.add(group if ranks is None or dist.get_rank() in ranks else None)
    return group  # type: ignore[no-any-return]


def _end_with_launcher() -> None:
    """Let the kernel end this process when the launcher dies; otherwise ranks outlive an mpirun that is killed."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        chosen = ctypes.c_int(0)
        libc.prctl(2, ctypes.byref(chosen))  # PR_GET_PDEATHSIG: under rannc-run it is already set
        if chosen.value == 0:
            libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _initialise(place: LaunchedRank) -> None:
    """Call init_process_group; without MASTER_ADDR (under a plain mpirun) rank 0 broadcasts its address through MPI."""
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        address, port = _agree_through_mpi(place)
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    network_interface.choose(os.environ)
    backend = _backend()
    if place.rank:
        _await_listener(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    server = None if place.rank else _loopback_server(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    store = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group(backend, init_method=store, rank=place.rank, world_size=place.size, timeout=TIMEOUT)
    del server  # it ends with the group now
    default_group.share(backend)


def _backend() -> str:
    return "cpu:gloo,cuda:nccl" if has_accelerator() else "gloo"


def _loopback_server(address: str, port: str) -> object:
    """Store in which ranks of one machine meet, listening on a loopback address; None if theirs is another address.

    torch would listen on all interfaces; as `multi_tenant` it takes this server of the same port and process instead.
    """
    loopback = network_interface.loopback_address(address)
    if not loopback or not network_interface.is_one_machine(os.environ):
        return None
    family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
    try:
        listener = socket.create_server((loopback, int(port)), family=family, backlog=4096)
    except (OSError, ValueError, OverflowError):
        return None  # torch says what is wrong with the port; under torchrun its own process listens there
    return dist.TCPStore(  # type: ignore[attr-defined]  # public, but not in its __all__
        loopback,
        int(port),
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def _await_listener(address: str, port: str) -> None:
    """Wait until rank 0 listens. torch would wait as well, but polls only every 0.1 to 0.6 s."""
    deadline = time.monotonic() + KNOCK_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, int(port)), timeout=1.0).close()
            return
        except (socket.gaierror, ValueError):
            return  # torch reports what is wrong with the address
        except OSError:
            time.sleep(PAUSE_S)


def _leave() -> None:
    """Exit handler that neither aborts this process nor makes other ranks fail first.

    gloo's threads free the tensors of finished work a moment after it is done, for which they need the GIL; if the
    interpreter is already finalizing, that aborts the process. So this handler releases the GIL for a while. Destroying
    the process groups would also wait for the threads, but it closes the connections as well, so that other ranks would
    fail before a rank that is exiting with an error. NCCL's communicators have to be destroyed.
    """
    if has_accelerator() and dist.is_initialized():
        dist.destroy_process_group()
    time.sleep(LOCK_S)


def _leave_alone() -> None:
    """Exit handler of a single rank: end its process group, and gloo's threads with it (see `_leave`)."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _agree_through_mpi(place: LaunchedRank) -> tuple[str, int]:
    """Address and a free port of rank 0, broadcast through MPI."""
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")  # initialising it takes a second
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
        address = "127.0.0.1"
        if not network_interface.is_one_machine(os.environ):
            with contextlib.suppress(OSError, UnicodeError):
                address = socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        told = f"{address} {port}".encode().ljust(128)
    buffer = bytearray(told or bytes(128))
    world.Bcast([buffer, MPI.BYTE], root=0)
    address, text = bytes(buffer).decode().split()
    return address, int(text)
