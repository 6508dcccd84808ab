"""How the ranks of a job find each other: which rank the launcher says this is, and torch.distributed's groups.

A process adopts, in this order: a torch.distributed group that the script has initialised, the environment of
rannc-run or torchrun, and that of an MPI launcher. Alone, it needs none of them.
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
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rannd import log
from rannd.errors import LaunchError
from rannd.rank_variables import WORLDS
from rannd.runtime.comm import network_interface
from rannd.runtime.failure.connections import Connections

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
    for rank, size, local_rank, _ in WORLDS:
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


def join(place: LaunchedRank, connections: Connections) -> None:
    """Initialise torch.distributed, unless the script has done that, or this rank is alone. Collective."""
    if place.launcher.startswith(("OMPI", "PMI")):
        _end_with_launcher()
    if place.size > 1 and not dist.is_initialized():
        with connections.recording():
            _initialise(place)


def make_group(connections: Connections, backend: str, ranks: Sequence[int] | None = None) -> dist.ProcessGroup | None:
    """A process group of some ranks, or of all. Collective over all ranks; those outside of it get no usable group."""
    with connections.recording():
        group = dist.new_group(ranks, backend=backend, timeout=TIMEOUT)
    connections.add(group if ranks is None or dist.get_rank() in ranks else None)
    return group  # type: ignore[no-any-return]


def _end_with_launcher() -> None:
    """Ranks outlive an mpirun that is killed, unless they ask the kernel for a signal at its end."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        chosen = ctypes.c_int(0)
        libc.prctl(2, ctypes.byref(chosen))  # PR_GET_PDEATHSIG: rannc-run has seen to it already
        if chosen.value == 0:
            libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _initialise(place: LaunchedRank) -> None:
    """Let all ranks connect: rannc-run and torchrun say where, under a bare mpirun rank 0 tells through MPI."""
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
