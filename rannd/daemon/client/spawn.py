"""Starts the daemon on demand.

::

    a rank                              boot.py                        the daemon
    probe: nobody listens
    take `spawn` lock
    probe again ── Popen, own session ──► fork ───────────────────────► take `life` lock
    reap          ◄────────────── exit ───┘                             bind, listen, open the store
    readable pipe ◄──────────────────────────────────── "ready" ─────── answer
    release `spawn` lock
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import zmq

import rannd
from rannd.daemon.client import request_channel
from rannd.daemon.common import file_locks, protocol
from rannd.daemon.common.listening import answers
from rannd.daemon.common.paths import DaemonPaths
from rannd.daemon.common.paths import places as default_places
from rannd.daemon.common.versions import is_older, version
from rannd.daemon.server import boot
from rannd.daemon.server.server import Settings
from rannd.errors import DaemonError, ProtocolError

KEPT = frozenset(
    ("HOME", "USER", "LOGNAME", "PATH", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME")
)
"""Environment variables that the daemon inherits, and LC_*: none of a rank, MPI, CUDA or a batch system."""
MOST_REPLACED = 2
"""Maximum number of older daemons to stop per greeting: systemd may start the next one, of its unit, at once."""
MAX_LOG = 256 << 10
"""Bytes above which a starting daemon begins a new log; one old log is kept."""


class Daemon(msgspec.Struct, frozen=True):
    """The running daemon."""

    pid: int
    version: str
    started: bool
    """Whether this call started it."""


def ensure(*, idle_s: float, max_bytes: int, timeout_s: float, places: DaemonPaths | None = None) -> Daemon:
    """Make sure that a daemon runs which is not older than this process.

    Args:
        idle_s: It exits after so many seconds without a request; 0: never.
        max_bytes: Maximum bytes of values that it stores.
        timeout_s: Maximum seconds for all of it.
        places: Paths of the daemon; by default those of the environment.

    Raises:
        DaemonError: It cannot be started, or does not answer. The message has the reason and the end of the daemon's
            log.
    """
    where = places if places is not None else default_places()
    settings = Settings(idle_s, max_bytes, version())
    deadline = time.monotonic() + timeout_s
    where.secure_runtime()
    with file_locks.held(where.use, deadline, shared=True):
        return greet(where, settings, deadline)


def greet(places: DaemonPaths, settings: Settings, deadline: float) -> Daemon:
    """Start the daemon if it does not run, replace an older one, exchange versions. The caller holds `use` shared."""
    started, replaced = False, 0
    while True:
        started = start_if_down(places, settings, deadline) or started
        try:
            try:
                welcome = _hello(places, settings, deadline)
                if not is_older(welcome.version, settings.version) or replaced == MOST_REPLACED:
                    return Daemon(welcome.pid, welcome.version, started)
            except protocol.VersionError as exc:
                if exc.version > protocol.PROTOCOL:
                    raise
                if replaced == MOST_REPLACED:
                    raise DaemonError(
                        f"an older rannd, of protocol version {exc.version}, is started again after it was stopped; "
                        "if systemd does so, run `rannd install-service --force` of the newer one and do what it prints"
                    ) from None
            _replace(places, settings, deadline)
            started, replaced = True, replaced + 1
        except request_channel.GoneError:
            if time.monotonic() >= deadline:
                raise DaemonError(f"the daemon starts but exits at once; its log is {places.log}") from None


def start_if_down(places: DaemonPaths, settings: Settings, deadline: float) -> bool:
    """Start a daemon if none listens; return whether it was started. The caller holds `use` shared.

    Raises:
        DaemonError: It cannot be started.
    """
    if answers(places.socket):
        return False
    places.secure_runtime()
    with file_locks.held(places.spawn, deadline):
        if answers(places.socket):
            return False
        _start(places, settings, deadline)
    return True


def stop(places: DaemonPaths, reason: str, deadline: float) -> bool:
    """Stop the daemon after it has answered queued requests, and wait for its end; return False if none runs.

    Raises:
        DaemonError: It does not exit in time.
    """
    places.secure_runtime()
    if not boot.lives(places) or not answers(places.socket):  # connecting would start one under systemd
        return False
    try:
        try:
            request_channel.ask(places.socket, protocol.Stop(reason), deadline)
        except protocol.VersionError as exc:
            request_channel.ask(places.socket, protocol.Stop(reason), deadline, exc.version)
    except request_channel.GoneError:
        pass
    except ProtocolError:
        raise
    except DaemonError as exc:
        try:
            pid = Path(places.life).read_text(encoding="ascii", errors="replace").strip()
        except OSError:  # it was deleted
            pid = "unknown"
        raise DaemonError(
            f"the daemon, process {pid}, does not answer; end it by `kill -9 {pid}`, which loses nothing that it has "
            "acknowledged"
        ) from exc
    _await_end(places, deadline)
    return True


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the part of a rank's environment that the daemon inherits."""
    return {name: value for name, value in environ.items() if name in KEPT or name.startswith("LC_")}


def _hello(places: DaemonPaths, settings: Settings, deadline: float) -> protocol.Welcome:
    hello = protocol.Hello(settings.version, settings.idle_s, settings.max_bytes)
    reply = request_channel.ask(places.socket, hello, deadline)
    if not isinstance(reply, protocol.Welcome):
        raise DaemonError(f"the daemon at {places.socket} answers {reply} to a greeting; `rannd restart`")
    return reply


def _replace(places: DaemonPaths, settings: Settings, deadline: float) -> None:
    """Replace an older daemon by one of this version."""
    with file_locks.held(places.spawn, deadline):
        version, older = protocol.PROTOCOL, "one of protocol version {}"
        try:
            welcome = _hello(places, settings, deadline)
            if not is_older(welcome.version, settings.version):
                return  # another process was faster
            older = welcome.version
        except protocol.VersionError as exc:
            if exc.version > protocol.PROTOCOL:
                raise
            version, older = exc.version, older.format(exc.version)
        request_channel.ask(
            places.socket, protocol.Stop(f"rannd {settings.version} replaces {older}"), deadline, version
        )
        _await_end(places, deadline)
        if not answers(places.socket):
            _start(places, settings, deadline)


def _await_end(places: DaemonPaths, deadline: float) -> None:
    life = file_locks.open_lock(places.life)
    try:
        # A successor may hold the lock by now: then the stopped daemon has exited, too.
        pid = os.pread(life, 32, 0)
        while not file_locks.wait_lock(life, min(deadline, time.monotonic() + 0.05), shared=True):
            if os.pread(life, 32, 0) != pid:
                return
            if time.monotonic() >= deadline:
                raise DaemonError(f"the daemon, process {pid.decode().strip()}, does not end; see {places.log}")
    finally:
        os.close(life)


def _start(places: DaemonPaths, settings: Settings, deadline: float) -> None:
    """Start the daemon and wait until it is ready. The caller holds the spawn lock."""
    log = _open_log(places.log)
    ready, ready_end = os.pipe()
    try:
        offset = os.fstat(log).st_size
        orders = boot.Orders(_roots(), ready_end, places, settings)
        program = [sys.executable, "-I", "-S", boot.__file__, msgspec.json.encode(orders).decode()]
        try:
            child = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(ready_end,),
                cwd="/",
                env=clean_environment(os.environ),
                start_new_session=True,
            )
        finally:
            os.close(ready_end)
        said = _read_line(ready, deadline)
        try:
            child.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if said != "ready":
            words = said or f"it did not become ready; its log {places.log} ends with:\n{_tail(log, offset)}"
            raise DaemonError(f"the daemon cannot be started: {words}")
    finally:
        os.close(ready)
        os.close(log)


def _read_line(fd: int, deadline: float) -> str:
    """Read one line from the pipe, or what is there at its end or at the deadline."""
    said = b""
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    while not said.endswith(b"\n"):
        if not poll.poll(min(max(0.0, deadline - time.monotonic()), 1e6) * 1000):  # 12 days: it takes a C int
            break
        part = os.read(fd, 4096)
        if not part:
            break
        said += part
    return said.decode("utf-8", "replace").strip()


def _roots() -> list[str]:
    """Return the directories of rannd and the packages it needs, so that the daemon imports the same ones."""
    files = [rannd.__file__, zmq.__file__, msgspec.__file__, psutil.__file__]
    return list(dict.fromkeys(str(Path(file).resolve().parent.parent) for file in files if file is not None))


def _open_log(path: str) -> int:
    try:
        with suppress(FileNotFoundError):
            if os.stat(path).st_size > MAX_LOG:
                os.replace(path, path + ".1")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise DaemonError(f"the log {path} cannot be opened: {exc.strerror}; check its type and permissions") from exc


def _tail(log: int, offset: int) -> str:
    text = os.pread(log, 16384, max(offset, os.fstat(log).st_size - 16384)).decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-10:]) or "(nothing)"
