"""Starts the daemon's process: in the foreground (`rannd run`), or detached, as the program that `spawn` executes.

Run as a script with ``-I -S`` and one JSON argument (`Orders`), so that the current directory, PYTHONPATH and
site-packages' start-up files have no effect. It forks once more: the daemon is not a child of the rank that started it
and outlives it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import sys
import time
from contextlib import suppress

if __name__ == "__main__":
    sys.path += json.loads(sys.argv[1])["roots"]

import msgspec

from rannd.daemon.common import file_locks
from rannd.daemon.common.listening import answers
from rannd.daemon.common.paths import DaemonPaths
from rannd.daemon.server.server import Server, Settings
from rannd.errors import DaemonError
from rannd.ranks import open_files

BACKLOG = 4096
DESCRIPTORS = 65536
"""Limit of open files that the daemon requests, as far as it is allowed."""
LIFE_S = 3.0
"""Seconds that a previous daemon may take to exit. Shorter than a client waits, so that the client gets the error."""


class Orders(msgspec.Struct, frozen=True):
    """Arguments of the detached program, as JSON."""

    roots: list[str]
    """Directories of rannd and the packages it needs, searched last."""
    ready_fd: int
    """Pipe for one line: ``ready``, or the error."""
    places: DaemonPaths
    settings: Settings


def run(places: DaemonPaths, settings: Settings, *, on_ready: str | None = None, ready_fd: int | None = None) -> bool:
    """Run the daemon until it exits; return False if another one runs already.

    Args:
        places: Paths of the daemon.
        settings: Limits.
        on_ready: Line to print once it listens.
        ready_fd: Descriptor to write ``ready`` to, and to close, once it listens.

    Raises:
        DaemonError: A directory or the store cannot be used, or a previous daemon does not exit.
    """
    places.secure_runtime()
    places.secure_cache()
    activated = _activated(places.socket)
    life = file_locks.open_lock(places.life)
    try:
        deadline = time.monotonic() + LIFE_S
        while not file_locks.wait_lock(life, min(deadline, time.monotonic() + 0.05)):
            if activated is None and answers(places.socket):
                return False
            if time.monotonic() >= deadline:
                raise DaemonError(
                    f"another daemon holds {places.life} but does not listen at {places.socket}; "
                    f"end process {_written_pid(life)}"
                )
        if activated is None and answers(places.socket):
            return False  # its lock file was deleted, the running daemon will make it again
        open_files.make_room(DESCRIPTORS - open_files.SPARE, "clients")  # each takes one
        file_locks.write_pid(life)
        listener = activated or _listen(places.socket)
        try:
            server = Server(places, settings, listener, life, owns_socket=activated is None)
        except DaemonError:
            if activated is None:
                os.unlink(places.socket)  # nobody will answer there
            raise
        if on_ready is not None:
            print(on_ready, flush=True)
        if ready_fd is not None:
            with suppress(BrokenPipeError):  # the starter may have timed out; the daemon still serves others
                os.write(ready_fd, b"ready\n")
            os.close(ready_fd)
        server.serve()
    finally:
        os.close(life)
    return True


def lives(places: DaemonPaths) -> bool:
    """Whether a daemon holds the `life` lock. Unlike `answers`, this does not trigger systemd's socket activation."""
    try:
        life = os.open(places.life, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not file_locks.try_lock(life, shared=True)
    finally:
        os.close(life)


def _listen(path: str) -> socket.socket:
    """Create a listening socket at `path`. The caller holds the life lock, so an existing one is a dead daemon's."""
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise DaemonError(f"the socket {path} cannot be created: {exc.strerror}; remove what is at this path") from exc
    return listener


def _activated(path: str) -> socket.socket | None:
    """Return the listening socket that systemd passes (sd_listen_fds(3)), or None.

    Raises:
        DaemonError: It does not listen where clients look.
    """
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or os.environ.get("LISTEN_FDS") in (None, "", "0"):
        return None
    listener = socket.socket(fileno=3)
    found = listener.getsockname()
    if listener.family != socket.AF_UNIX or found != path:
        listener.detach()
        raise DaemonError(
            f"the activated socket is {found!r}, clients look at {path}; correct ListenStream= in rannd.socket"
        )
    os.set_inheritable(3, False)
    return listener


def _written_pid(life: int) -> str:
    return os.pread(life, 32, 0).decode("ascii", "replace").strip() or "unknown"


def main() -> None:
    """Entry point of the detached program."""
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # mpirun may have bound the rank to one core
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] [%(process)d] [%(levelname)s] %(message)s")
    try:
        if not run(orders.places, orders.settings, ready_fd=orders.ready_fd):
            os.write(orders.ready_fd, b"ready\n")
    except DaemonError as exc:
        logging.error("%s", exc)
        os.write(orders.ready_fd, f"{exc}\n".encode())
        sys.exit(exc.exit_code)
    except Exception:
        logging.exception("rannd exits because of an internal error")
        sys.exit(1)


if __name__ == "__main__":
    main()
