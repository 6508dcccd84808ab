"""`notebook_launcher`: a function of a notebook on several ranks of this machine."""

from __future__ import annotations

import atexit
import io
import numbers
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch
from torch.multiprocessing.spawn import start_processes

from rannd.device.identity import accelerator_is_used
from rannd.errors import LaunchError, UsageError
from rannd.ranks.rank_variables import as_torchrun
from rannd.runtime.comm import world
from rannd.runtime.comm.rendezvous import find_place

PATIENCE_S = 10.0
"""Seconds that a rank has to end when it is asked to."""


def notebook_launcher(function: Callable[..., object], np: int, args: Sequence[Any] = ()) -> None:
    """Run ``function(*args)`` on `np` ranks, and wait for them.

    Ranks are forked from this process, so that the function may be defined in a notebook and use what is there; what it
    changes stays in the ranks. Save what is wanted of it, on rank 0, in a file. A rank has its share of the cores as
    threads. An interrupt ends all ranks.

    Args:
        function: Builds and wraps the model, and trains it. What it returns is dropped.
        np: Number of ranks.
        args: Its arguments.

    Raises:
        UsageError: `function` is no function, or `np` no number of ranks.
        LaunchError: This process is a rank itself, has a wrapped model, or has used a GPU, which a fork cannot.
        torch.multiprocessing.ProcessRaisedException: A rank has failed, with its traceback; the others are ended.
    """
    if not callable(function):
        raise UsageError(
            f"notebook_launcher({function!r}, ..): this is no function; pass the function, not its result: "
            "notebook_launcher(train, np=2, args=(8,)), not notebook_launcher(train(8), np=2)"
        )
    if not isinstance(np, numbers.Integral) or np < 1:
        raise UsageError(f"notebook_launcher(.., np={np!r}): np is the number of ranks, 1 or more")
    if find_place(os.environ).launcher:
        raise LaunchError("notebook_launcher starts ranks, but this process is one already; call the function itself")
    if world.made() is not None:
        raise LaunchError(
            "notebook_launcher cannot start ranks after a model was wrapped in this process: wrap it in the function, "
            "and restart the notebook's kernel"
        )
    if accelerator_is_used():
        raise LaunchError(
            "notebook_launcher cannot start ranks after this process has used a GPU: do so in the function only, and "
            "restart the notebook's kernel"
        )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = start_processes(_run, (np, port, function, tuple(args)), np, join=False, start_method="fork")
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.terminate()
        for process in ranks.processes:
            process.join(PATIENCE_S)
            process.kill()
            process.join()


def _run(rank: int, np: int, port: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """In a rank: what ends this process is what it has registered itself, not what the notebook has."""
    sys.stdout, sys.stderr = _whole_lines(sys.stdout), _whole_lines(sys.stderr)
    atexit._clear()
    # Of an earlier cell: at exit they would be taken for this rank's error.
    sys.last_exc = sys.last_value = None  # type: ignore[attr-defined]  # last_exc: since Python 3.12
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(as_torchrun(rank, np, rank, np), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // np, 1))
    try:
        function(*args)
    finally:
        atexit._run_exitfuncs()


def _whole_lines(stream: TextIO) -> TextIO:
    """A notebook's output, which passes on each argument of `print` alone, between those of other ranks."""
    if isinstance(stream, io.TextIOWrapper):  # of a script, which has a buffer
        return stream
    return io.TextIOWrapper(_Encoded(stream), "utf-8", "surrogatepass", newline="", line_buffering=True)


class _Encoded(io.BufferedIOBase):
    """A stream of text for a `TextIOWrapper`, which then passes on whole lines, and each state of a bar (\\r)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.name = getattr(stream, "name", "")

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data).decode("utf-8", "surrogatepass"))
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
