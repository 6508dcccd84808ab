"""What ranks get beyond their user's environment, and what is left alone."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rannd.ranks.core_share import CORES_VARIABLE
from rannd.runner.resources import rank_environment
from rannd.runner.resources.rank_environment import CUDA_SETTINGS, MALLOC_SETTINGS


@pytest.mark.parametrize(("cores", "local_ranks", "threads"), [(8, 2, "4"), (2, 4, "1"), (7, 2, "3"), (4, 1, "4")])
def test_threads_are_shared_out(cores: int, local_ranks: int, threads: str) -> None:
    tuned = rank_environment.tuning({"MALLOC_ARENA_MAX": "2"}, cores=cores, local_ranks=local_ranks, gpus=0)
    assert tuned.variables == {"OMP_NUM_THREADS": threads}
    assert tuned.line() == f"tuned OMP_NUM_THREADS={threads}; --no-tune turns this off"


@pytest.mark.parametrize(
    ("environ", "cores", "ranks", "gpus", "binds", "bound"),
    [
        ({}, 8, 2, 0, True, True),
        ({"OMP_NUM_THREADS": "4"}, 8, 2, 0, True, True),
        ({"OMP_NUM_THREADS": "5"}, 8, 2, 0, True, False),
        ({"OMP_NUM_THREADS": "2,1"}, 8, 2, 0, True, False),
        ({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "5"}, 8, 2, 0, True, False),
        ({CORES_VARIABLE: "0"}, 8, 2, 0, True, False),
        ({}, 8, 1, 0, True, False),
        ({}, 2, 3, 0, True, False),
        ({}, 8, 2, 2, True, False),
        ({}, 8, 2, 0, False, False),
    ],
)
def test_cpu_ranks_get_cores_of_their_own(
    environ: dict[str, str], cores: int, ranks: int, gpus: int, binds: bool, bound: bool
) -> None:
    tuned = rank_environment.tuning(environ, cores=cores, local_ranks=ranks, gpus=gpus, binds=binds)
    assert tuned.variables.get(CORES_VARIABLE) == (str(cores) if bound else None)
    assert ("cores of its own for each rank" in tuned.line()) == bound


def test_cpu_ranks_get_malloc_settings() -> None:
    tuned = rank_environment.tuning({"OMP_NUM_THREADS": "9"}, cores=2, local_ranks=2, gpus=0)
    assert tuned.variables == MALLOC_SETTINGS
    assert tuned.line() == "tuned malloc that keeps freed memory (MALLOC_*); --no-tune turns this off"


@pytest.mark.parametrize(
    "own", [{"MALLOC_ARENA_MAX": "1"}, {"LD_PRELOAD": "/usr/lib/libjemalloc.so"}, {"GLIBC_TUNABLES": "x"}]
)
def test_the_users_own_malloc_stays(own: dict[str, str]) -> None:
    tuned = rank_environment.tuning({"OMP_NUM_THREADS": "1", **own}, cores=2, local_ranks=2, gpus=0)
    assert (tuned.variables, tuned.line()) == ({}, "")


def test_gpu_ranks_get_queues_and_an_allocator_that_grows() -> None:
    cores = {"cores": 2, "local_ranks": 2, "gpus": 2}
    assert rank_environment.tuning({"OMP_NUM_THREADS": "1"}, **cores).variables == CUDA_SETTINGS
    own = {"OMP_NUM_THREADS": "1", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert rank_environment.tuning(own, **cores).variables == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    }
    assert rank_environment.forwarded_names(CUDA_SETTINGS) == sorted(CUDA_SETTINGS)


def test_the_meeting_point() -> None:
    assert rank_environment.meeting_point({"MASTER_ADDR": "x", "MASTER_PORT": "1"}, None) == {}
    point = rank_environment.meeting_point({}, "node1")
    assert point["MASTER_ADDR"] == "node1"
    with socket.socket() as sock:
        sock.bind(("", int(point["MASTER_PORT"])))
    assert rank_environment.meeting_point({}, None)["MASTER_ADDR"] == "127.0.0.1"


def test_the_port_is_none_that_an_outgoing_connection_may_get() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert first > rank_environment.LOWEST_PORT, "on this machine"
    found = {rank_environment.free_port() for _ in range(50)}
    assert all(rank_environment.LOWEST_PORT <= port < first for port in found)
    assert len(found) > 40, "jobs that start at once get different ones"


def test_a_port_is_found_where_all_may_be_used_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_environment, "_first_ephemeral_port", lambda: 1024)
    assert rank_environment.free_port() >= 1024


def test_what_travels_to_other_machines() -> None:
    names = [
        "RANNC_CACHE",
        "RANND_WATCHER",
        "MASTER_PORT",
        "NCCL_DEBUG",
        "HOME",
        "CUDA_VISIBLE_DEVICES",
        "SSH_AUTH_SOCK",
    ]
    assert rank_environment.forwarded_names(names) == ["MASTER_PORT", "NCCL_DEBUG", "RANNC_CACHE", "RANND_WATCHER"]
