"""Ranks as forks of a process that has torch imported: importing it is most of what a short job costs.

::

    rannc-run ── mpirun ── watcher ── python fork_server.py train.py   (a proxy, without torch)
    pytest ── python fork_server.py --serve SOCKET ── the rank         (forked for the proxy)

The proxy hands over its arguments, directory, environment, output and namespaces, forwards signals, and ends as the
rank ends. A rank whose proxy or server is gone is killed. What differs from a start of its own: the rank is no
descendant of rannc-run, it cannot start MPI, its objects are not destroyed at its end, variables that are read while a
process or torch starts (LD_PRELOAD, malloc's, PYTHONPATH) have no effect, and all ranks have one hash seed. So tests of
processes and signals, of memory, of MPI and of what is imported start their ranks themselves.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

VARIABLE = "TORCH_FORK_SERVER"
"""Names the socket; so called because rannc-run passes TORCH_* on to ranks of other nodes."""
NAMESPACES = ("net", "uts", "mnt")
"""Those of the proxy are the rank's: tests/nodes has a network, a name and a home for each node."""
PRELOADED = ("torch", "sympy", "torch.distributed", "torch.export._trace", "torch._dynamo", "pyrannc")
"""What nearly every job imports, of other people's: the project's own code is imported by each rank."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1


@contextmanager
def running(path: Path) -> Iterator[None]:
    """A server that listens at `path`, until the end of the block."""
    command = [sys.executable, __file__, "--serve", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The end of its standard input is the server's.
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield


def serve(path: str) -> dict[str, Any]:
    """Forks for whoever connects; ends with standard input. Returns in the forks alone, with what they are to run."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else the first collection of each fork would copy every page
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    proxies: dict[int, tuple[int, socket.socket]] = {}  # by the pidfd of the rank
    server = os.getpid()
    while True:
        polled = select.poll()
        for fd in (0, listener.fileno(), *proxies, *(proxy.fileno() for _, proxy in proxies.values())):
            polled.register(fd, select.POLLIN)
        ready = {fd for fd, _ in polled.poll()}
        if 0 in ready:
            os._exit(0)  # the kernel ends the ranks
        for rank in list(proxies):
            pid, proxy = proxies[rank]
            if rank in ready:
                with suppress(OSError), proxy:  # it may be gone
                    proxy.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(rank)
                del proxies[rank]
            elif proxy.fileno() in ready:
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        if listener.fileno() in ready:
            proxy, _ = listener.accept()
            size, passed, _, _ = socket.recv_fds(proxy, 8, 3 + len(NAMESPACES))
            with proxy.makefile("rb") as text:
                told = json.loads(text.read(int.from_bytes(size, "big")) or "null")
            if told is None:
                continue  # the proxy was killed
            pid = os.fork()
            if pid == 0:
                listener.close()
                for other, (_, beside) in proxies.items():
                    os.close(other)
                    beside.close()
                proxy.close()
                _become(told, passed, server)
                return dict(told)
            for fd in passed:
                os.close(fd)
            with suppress(OSError):
                proxy.sendall(b"%d\n" % pid)
            proxies[os.pidfd_open(pid)] = (pid, proxy)


def _become(told: dict[str, Any], passed: list[int], server: int) -> None:
    """Makes this fork what a process that was started would be: `passed` are its standard streams and namespaces."""
    os.setsid()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    for target, fd in enumerate(passed[:3]):
        os.dup2(fd, target)
        os.close(fd)
    for name, fd in zip(NAMESPACES, passed[3:], strict=True):
        if os.fstat(fd).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino and libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"the namespace {name} cannot be entered")
        os.close(fd)
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    random.seed()
    sys.modules["numpy"].random.seed()


def run(arguments: list[str]) -> None:
    """Runs a script as ``python script.py ..`` does."""
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.realpath(arguments[0]))
    main = ModuleType("__main__")
    main.__dict__.update(__file__=arguments[0], __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), main.__dict__)


def end(function: Callable[[list[str]], None], arguments: list[str]) -> NoReturn:
    """Calls `function` and ends this process as Python does, but for taking the interpreter apart.

    That would copy most pages of the server, and takes longer than many a script.
    """
    code: object = 0
    try:
        function(arguments)
    except SystemExit as exc:
        code = exc.code
    except Exception as exc:
        trace = exc.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(exc), exc, trace)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(int(code or 0) & 0xFF)


def stand_for_a_rank(path: str) -> int:
    """The proxy's part: how the rank ended, as subprocess gives it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    told = {"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(told).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        socket.send_fds(server, [len(text).to_bytes(8, "big")], [0, 1, 2, *namespaces])
        server.sendall(text)
        with server.makefile("rb") as answers:
            rank = int(answers.readline())
            for signum in FORWARDED:
                signal.signal(signum, lambda number, _: os.kill(rank, number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            return int(answers.readline())


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        end(run, serve(sys.argv[2])["arguments"])
    else:
        code = stand_for_a_rank(os.environ.pop(VARIABLE))
        if code < 0:
            with suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
