"""Failures and hangs on devices, where the host goes on while transfers and backwards run elsewhere."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import rannd
from rannd.errors import RankFailedError, StepError
from rannd.plan.deployment import Slot
from rannd.runtime.comm.rendezvous import LaunchedRank
from rannd.runtime.comm.world import World
from rannd.runtime.failure import stack_dump
from rannd.runtime.failure.detector import FailureDetector
from rannd.runtime.failure.failure_report import Failure
from rannd.runtime.failure.position import Where

RANND, TORCH = (os.path.dirname(os.path.abspath(module.__file__ or "")) for module in (rannd, torch))
ENGINE = (os.path.join(TORCH, "autograd", "graph.py"), "_engine_run_backward")
STAGE = (os.path.join(RANND, "runtime", "execution", "stage.py"), "backward")
HOOK = (os.path.join(RANND, "runtime", "gradients", "reducer.py"), "hook")
REDUCE = (os.path.join(os.path.dirname(dist.__file__), "distributed_c10d.py"), "all_reduce")
KERNEL = ("/home/user/my_kernels.py", "slow")


@pytest.fixture
def running() -> Iterator[Callable[..., int]]:
    """Starts a thread whose stack is that of given functions (file, name), and returns its number."""
    locks: list[_thread.LockType] = []

    def run(*functions: tuple[str, str], by_python: bool = False) -> int:
        entered, lock = threading.Event(), _thread.allocate_lock()
        lock.acquire()
        locks.append(lock)
        numbers: list[int] = []

        def enter() -> None:
            numbers.append(threading.get_ident())
            entered.set()

        call: Callable[[], None] = enter
        body = "call(); lock.acquire()"  # the innermost function waits in a call of C, which has no frame
        for file, name in reversed(functions):
            scope: dict[str, Any] = {"call": call, "lock": lock}
            exec(compile(f"def {name}():\n    {body}", file, "exec"), scope)
            call, body = scope[name], "call()"
        if by_python:
            threading.Thread(target=call, daemon=True).start()
        else:
            _thread.start_new_thread(call, ())
        assert entered.wait(10)
        return numbers[0]

    yield run
    for lock in locks:
        lock.release()


def test_a_hang_in_a_hook_in_autograds_thread_is_a_wait(running: Callable[..., int]) -> None:
    where = Where()
    where.thread = running(STAGE, ENGINE)
    assert stack_dump.doing(where) == "working", "a backward that computes"
    running(KERNEL)
    assert stack_dump.doing(where) == "working"
    running(HOOK, REDUCE)
    assert stack_dump.doing(where) == "waiting"


def test_a_saver_that_waits_is_not_the_backward(running: Callable[..., int]) -> None:
    where = Where()
    where.thread = running(STAGE, ENGINE)
    running(HOOK, REDUCE, by_python=True)
    assert stack_dump.doing(where) == "working"


def test_a_read_of_the_device_is_a_wait(running: Callable[..., int]) -> None:
    where = Where()
    where.thread = running(STAGE, (os.path.join(RANND, "device", "reads.py"), "end"))
    assert stack_dump.doing(where) == "waiting"


def test_a_script_that_reads_a_device_that_is_not_done_waits() -> None:
    watch, where = FailureDetector(), Where()
    where.thread = 0
    assert watch._doing(where) == "script"
    watch.outstanding = lambda: True
    assert watch._doing(where) == "waiting"


@pytest.mark.parametrize(
    "text",
    [
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.3\nncclUnhandledCudaError: "
        "Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
        "CUDA out of memory. Tried to allocate 2.00 GiB; NCCL's buffers are not included",
    ],
)
def test_out_of_memory_in_nccl_is_no_broken_connection(text: str) -> None:
    watch = FailureDetector()
    with pytest.raises(RuntimeError, match="out of memory") as raised, watch.inside("forward"):
        raise RuntimeError(text)
    assert not isinstance(raised.value, StepError)
    with pytest.raises(StepError, match="a connection to another rank broke"), watch.inside("forward"):
        raise RuntimeError("NCCL error: remote process exited or there was a network error")


def test_nothing_of_a_step_is_used_after_another_ranks_failure() -> None:
    """An aborted transfer of a device ends like any other: what waits for it raises nothing."""
    watch, transport = FailureDetector(), cast(Any, SimpleNamespace(reads_late=True))
    slots = (Slot(0, 0), Slot(0, 1))
    cpu = torch.device("cpu")
    world = World(LaunchedRank(0, 2, 0), cpu, ("host",) * 2, slots, (0, 1), None, None, transport, watch=watch)
    watch.ensure_intact()
    found: list[float] = []
    with watch.inside("forward"):
        world.reads.add(torch.ones(1), found.extend)
        world.reads.settle()
        world.reads.add(torch.full((1,), float("nan")), found.extend)
        watch.failure = Failure(1, "host", 7, "raised", "step 3", "ValueError: no")
        with pytest.raises(RankFailedError, match="rank 1"):
            watch.ensure_intact()
        with pytest.raises(RankFailedError, match="rank 1"):
            world.reads.settle()
    assert found == [1.0], "a NaN that the abort has made is not told instead of the failure"
