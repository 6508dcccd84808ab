"""The watcher of one rank: starts ``python train.py``, reports its end, and ends the processes that it leaves behind.

::

    mpirun ── stand-in ── watcher ── python train.py ── what the script forks
                             │           (leads its own session)
                             └── socket to the monitor in rannc-run: output, exit; signals, stop, quit

The rank sees the same as without a watcher: its arguments, directory, environment (and torchrun's names of its rank),
default signal handling; its standard input is empty. The watcher sends its output as bytes of a known rank and stream,
reports its end with the reason, and whichever ends first (rannc-run, mpirun, the watcher, the rank), the others of the
same rank end, too:

- rannc-run ends: the socket closes, and the watcher ends the rank; also if rannc-run's host is lost.
- mpirun ends, or ends its processes: so does the stand-in, and the kernel signals the watcher. The stand-in exists
  because Open MPI 5 sends SIGKILL 0.2 s after SIGTERM, whatever its options; it does not reach the watcher, which has
  time for the grace period.
- the watcher ends: the kernel kills the rank (PR_SET_PDEATHSIG); if the watcher's host is rannc-run's own, the monitor
  kills the rest of the session.

The watcher never exits by itself while the monitor exists: each MPI launcher reacts differently to the first process
that ends, and only the monitor knows whether the job is over.

Started as ``python -I -S -c "..."`` so that neither the user's directory nor site-packages can change or slow it: only
the standard library, here and in its imports.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rannd.ranks import core_share, memory_files, rank_notes
from rannd.ranks.host_name import host_name
from rannd.ranks.lost_host import LOOK_S, is_lost
from rannd.ranks.rank_variables import MPI_RANKS, torch_variables
from rannd.runner.watch import kept_memory, processes, wire
from rannd.runner.watch.line_channel import connect
from rannd.runner.watch.notice_socket import NoticeSocket, decode_noticed

#: Variable with the watcher's settings, removed from the environment before the rank starts.
SETTINGS_VARIABLE = "RANND_WATCHER"

#: Bytes of standard error to keep for the failure report.
_TAIL = 16 << 10
#: Output bytes to buffer for the monitor before the watcher stops reading (and the rank blocks in write).
_BACKLOG = 256 << 10
_CHUNK = 64 << 10
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def rank_of(environ: Mapping[str, str]) -> int | None:
    """Return this process's rank as set by the launcher, None outside a launcher."""
    for name in MPI_RANKS:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return None


def shielded(command: Sequence[str]) -> list[str]:
    """Escape `command` for a launcher's command line, where a lone colon begins another program: double it."""
    return [part + ":" if _is_colons(part) else part for part in command]


def _unshielded(command: Sequence[str]) -> list[str]:
    return [part[1:] if _is_colons(part) else part for part in command]


def _is_colons(part: str) -> bool:
    return part != "" and not part.strip(":")


class Watcher:
    """Runs one rank and reports to the monitor until it sends QUIT.

    Args:
        monitor: The connected socket.
        command: Command line of the rank.
        rank: Number of the rank.
        grace: Seconds between asking the rank to end and SIGKILL.
        log_dir: Directory for the rank's ``stdout``, ``stderr`` and ``error.json``, or None.
        notes: Whether the rank may tell how far it is (rank_notes.py), and keep steps in memory (memory_files.py).
        notices: Whether this watcher hears that hosts go away (notice_socket.py).
    """

    def __init__(
        self,
        monitor: socket.socket,
        command: list[str],
        rank: int,
        grace: float,
        log_dir: str | None,
        *,
        notes: bool = False,
        notices: bool = False,
    ) -> None:
        self._monitor: socket.socket | None = monitor
        self._reader = wire.FrameReader()
        self._outgoing = bytearray()
        self._rank = rank
        self._grace = grace
        self._log_dir = log_dir
        self._tail = bytearray()
        self._status: int | None = None  # of the rank, as of os.waitstatus_to_exitcode
        self._orders: list[int] = []  # the signals that the rank was asked to end with
        self._deadline: float | None = None  # when SIGKILL is due
        # On one machine the kernel reports the end of a process at once.
        self._look_at = None if monitor.family == socket.AF_UNIX else time.monotonic() + LOOK_S
        self._done = False
        self._quit = False
        self._memory: list[int] = []
        self._writer = 0  # pid of the process that writes what is in memory
        self._no_memory = self._make_memory() if notes else ""
        self._logs: dict[bytes, int] = {}
        if log_dir is not None:
            os.makedirs(log_dir, exist_ok=True)
            for stream, name in ((wire.STDOUT, "stdout"), (wire.STDERR, "stderr")):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._logs[stream] = os.open(os.path.join(log_dir, name), flags, 0o644)

        self._wakeup, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        # Handlers, not SIG_IGN, because exec passes an ignored signal on to the rank.
        for signum in _HANDLED:
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, lambda *_: None)
        processes.adopt_orphans()
        self._pid, *pipes = self._start(command, self._memory, notes=notes)
        self._pipes = dict(zip(pipes, (wire.STDOUT, wire.STDERR, wire.NOTE), strict=False))
        self._note = bytearray()  # the start of a line
        self._hears = notices
        self._notices: NoticeSocket | None = None  # not before there is a HELLO
        monitor.setblocking(False)

    @staticmethod
    def _start(command: list[str], memory: list[int], *, notes: bool) -> list[int]:
        """Fork and execute the rank; return its pid and the read ends of its output, and of its notes."""
        pipes = [os.pipe() for _ in range(3 if notes else 2)]
        watcher = os.getpid()
        # Signals are blocked until the fork has reset the watcher's handlers: one in between would be lost.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                processes.die_with_parent(watcher, signal.SIGKILL)
                signal.set_wakeup_fd(-1)
                for signum in _HANDLED:
                    if signal.getsignal(signum) != signal.SIG_IGN:
                        signal.signal(signum, signal.SIG_DFL)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; the rank's own Python decides
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
                null = os.open(os.devnull, os.O_RDONLY)
                for fd, target in ((null, 0), (pipes[0][1], 1), (pipes[1][1], 2)):
                    os.dup2(fd, target, inheritable=True)
                core_share.bind(os.environ)
                if notes:
                    rank_notes.give(pipes[2][1])
                if memory:
                    memory_files.give(memory)
                os.execvp(command[0], command)
            except OSError as error:
                os.write(2, f"rannc-run: cannot execute {command[0]!r}: {error}\n".encode())
            finally:
                os._exit(127)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        for read_end, write_end in pipes:
            os.close(write_end)
            os.set_blocking(read_end, False)
        return [pid, *(read_end for read_end, _ in pipes)]

    def run(self) -> None:
        """Send HELLO, then work until the monitor sends QUIT, or is gone and the rank has ended."""
        host = host_name().split(".")[0]
        self._send(wire.encode_json(wire.HELLO, rank=self._rank, host=host, pid=self._pid))
        if self._no_memory:
            message = f"rannc-run: this rank's steps cannot be kept in memory: {self._no_memory}\n"
            self._send(wire.encode(wire.STDERR, message.encode(errors="surrogateescape")))
        if self._hears:
            self._listen()
        while not self._quit:
            self._turn()
            if self._done and self._monitor is None:
                return

    def _listen(self) -> None:
        try:
            self._notices = NoticeSocket()
        except OSError as error:
            message = f"rannc-run: notify-preempt is not heard on {host_name()}: {error}\n"
            self._send(wire.encode(wire.STDERR, message.encode()))

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        if self._monitor is not None:
            poll.register(self._monitor, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        if len(self._outgoing) < _BACKLOG:
            for fd in self._pipes:
                poll.register(fd, select.POLLIN)
        for fd in self._notices.descriptors() if self._notices is not None else ():
            poll.register(fd, select.POLLIN)
        now = time.monotonic()
        due = [moment for moment in (self._deadline, self._look_at) if moment is not None]
        timeout = max(0.0, min(due) - now) * 1000 if due else None
        ready = {fd for fd, _ in poll.poll(timeout)}

        if self._wakeup in ready:
            self._take_signals()
        for fd in [fd for fd in self._pipes if fd in ready]:
            self._read_output(fd)
        if self._monitor is not None and self._monitor.fileno() in ready:
            self._talk()
        for notice in self._notices.hear() if self._notices is not None else ():
            self._send(wire.encode_json(wire.NOTICE, **notice._asdict()))
        if self._look_at is not None and time.monotonic() >= self._look_at:
            self._look_for_monitor()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._kill()
        if self._status is not None and not self._done and not processes.session_members(self._pid):
            self._finish()

    # --- the rank -------------------------------------------------------------------------------

    def _take_signals(self) -> None:
        received = set(os.read(self._wakeup, 4096))
        if signal.SIGCHLD in received:
            self._reap()
        # The stand-in has ended. A Ctrl-C (SIGINT) is forwarded by the monitor.
        if received & {signal.SIGTERM, signal.SIGHUP}:
            self._stop(signal.SIGTERM)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._writer:
                self._tell_written(os.waitstatus_to_exitcode(status))
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)
                self._report()

    def _report(self) -> None:
        """Report the end of the rank to the monitor, and end what the rank left in its session."""
        ended = time.time()
        for fd in list(self._pipes):
            self._drain(fd)
        leftovers = processes.signal_session(self._pid, signal.SIGTERM)
        names = [f"{pid} ({processes.process_name(pid)})" for pid in leftovers[:10]]
        if leftovers and self._deadline is None:
            self._deadline = time.monotonic() + self._grace
        tail = self._tail.decode(errors="replace")
        if self._status and self._log_dir is not None:
            self._write_error(ended, tail)
        self._send(
            wire.encode_json(
                wire.EXIT, status=self._status, time=ended, tail=tail, ordered=self._ordered(), leftovers=names
            )
        )

    def _ordered(self) -> int:
        """Return the order that the rank has followed, else the last one; 0: it had none."""
        followed = (order for order in self._orders if self._status in (-order, 128 + order))
        return int(next(followed, self._orders[-1] if self._orders else 0))

    def _write_error(self, ended: float, tail: str) -> None:
        assert self._log_dir is not None
        fields = {
            "host": host_name(),
            "rank": self._rank,
            "pid": self._pid,
            "time": ended,
            "status": self._status,
            "ended_by_signal_of_rannc_run": self._ordered(),
            "stderr_tail": tail,
        }
        path = os.path.join(self._log_dir, "error.json")
        try:
            with open(path + ".part", "w", encoding="utf-8") as file:
                json.dump(fields, file, indent=1)
            os.replace(path + ".part", path)
        except OSError as error:  # a full disk or a missing folder must not hide how the rank ended
            message = f"rannc-run: this rank's error.json in {self._log_dir} cannot be written: {error}\n"
            self._send(wire.encode(wire.STDERR, message.encode(errors="surrogateescape")))

    def _finish(self) -> None:
        """Report that no process of the rank's session is left."""
        for fd in list(self._pipes):
            # Not until end of file: a process that left the session may hold the pipe for ever.
            self._drain(fd)
        for fd in list(self._pipes):
            self._close_pipe(fd)
        for log in self._logs.values():
            os.close(log)
        self._logs.clear()
        self._deadline = None
        self._done = True
        self._send(wire.encode_json(wire.DONE, held=kept_memory.held(self._memory)))

    def _stop(self, signum: int) -> None:
        """Ask the rank to end, and set the time of its SIGKILL unless it is set already."""
        if self._done:
            return
        self._signal(signum)
        if self._status is None:
            self._orders.append(signum)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace

    def _signal(self, signum: int) -> None:
        if self._status is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if signum == signal.SIGINT:
                # As Ctrl-C in a terminal: the whole process group. Other signals go to the rank only, so that its
                # worker processes are still there while it saves a checkpoint.
                try:
                    os.killpg(self._pid, signum)
                except ProcessLookupError:  # the rank has not created its group yet
                    os.kill(self._pid, signum)
            else:
                os.kill(self._pid, signum)

    def _kill(self) -> None:
        if self._done:
            return
        if self._status is None:
            self._orders.append(signal.SIGKILL)
        processes.kill_session(self._pid)
        # Checked again until all are gone: SIGKILL takes effect with a delay.
        self._deadline = time.monotonic() + 0.05

    # --- the rank's memory ----------------------------------------------------------------------

    def _make_memory(self) -> str:
        """Make files in memory for the rank; return why there are none, or ''."""
        try:
            self._memory = memory_files.make()
        except OSError as error:
            return str(error)
        return ""

    def _rescue(self, order: dict[str, Any]) -> None:
        """Write what the rank has left in memory, in a process of its own."""
        try:
            self._writer = kept_memory.begin_writing(self._memory, order["number"], order["rank"], order["folder"])
        except OSError as error:
            self._send(wire.encode_json(wire.WROTE, error=str(error)))

    def _tell_written(self, code: int) -> None:
        self._writer = 0
        error = "" if code == 0 else os.strerror(code) if 0 < code < 255 else f"its process ended with {code}"
        self._send(wire.encode_json(wire.WROTE, error=error))

    # --- output ---------------------------------------------------------------------------------

    def _read_output(self, fd: int) -> bool:
        """Forward available output; return False if there is none, for now or at its end."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(fd)
            return False
        stream = self._pipes[fd]
        if stream == wire.NOTE:
            self._take_notes(data)
            return True
        self._log(stream, data)
        if stream == wire.STDERR:
            self._tail += data
            del self._tail[:-_TAIL]
        self._send(wire.encode(stream, data))
        return True

    def _take_notes(self, data: bytes) -> None:
        """Pass on whole lines that are JSON objects; a script can write anything here."""
        *lines, rest = (self._note + data).split(b"\n")
        self._note = rest[: rank_notes.LONGEST + 1]
        for line in lines:
            if len(line) <= rank_notes.LONGEST:
                with contextlib.suppress(wire.WireError):
                    wire.decode_json(bytes(line))
                    self._send(wire.encode(wire.NOTE, bytes(line)))

    def _log(self, stream: bytes, data: bytes) -> None:
        if stream not in self._logs:
            return
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._logs[stream], rest) :]
        except OSError as error:  # a full disk must not end a training run
            os.close(self._logs.pop(stream))
            message = f"rannc-run: this rank's log in {self._log_dir} ends here: {error}\n"
            self._send(wire.encode(wire.STDERR, message.encode(errors="surrogateescape")))

    def _drain(self, fd: int) -> None:
        # Bounded, because a remaining process may write without end; a pipe holds 64 KiB, or 1 MiB at most.
        for _ in range(16):
            if fd not in self._pipes or not self._read_output(fd):
                return

    def _close_pipe(self, fd: int) -> None:
        del self._pipes[fd]
        os.close(fd)

    # --- the monitor ----------------------------------------------------------------------------

    def _send(self, frame: bytes) -> None:
        if self._monitor is not None:
            self._outgoing += frame

    def _talk(self) -> None:
        assert self._monitor is not None
        try:
            if self._outgoing:
                with contextlib.suppress(BlockingIOError):
                    del self._outgoing[: self._monitor.send(self._outgoing)]
            data = self._monitor.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_monitor()
            return
        for kind, payload in self._reader.feed(data):
            if kind == wire.SIGNAL:
                self._signal(wire.decode_json(payload)["signal"])
            elif kind == wire.STOP:
                self._stop(wire.decode_json(payload)["signal"])
            elif kind == wire.KILL:
                self._kill()
            elif kind == wire.RESCUE:
                self._rescue(wire.decode_json(payload))
            elif kind == wire.QUIT:
                self._quit = True
            elif kind == wire.NOTICED and self._notices is not None:
                self._notices.answer(decode_noticed(payload))

    def _look_for_monitor(self) -> None:
        """Check whether the monitor's host still answers."""
        self._look_at = None
        if self._monitor is not None:
            if is_lost(self._monitor, reads_at_once=False):
                self._lose_monitor()
            else:
                self._look_at = time.monotonic() + LOOK_S

    def _lose_monitor(self) -> None:
        assert self._monitor is not None
        self._monitor.close()
        self._monitor = None
        if self._notices is not None:
            self._notices.close()
            self._notices = None
        self._outgoing.clear()
        self._stop(signal.SIGTERM)


def main() -> None:
    """Entry point: ``sys.argv[1:]`` is the rank's command line, escaped; RANND_WATCHER has the settings."""
    settings = json.loads(os.environ.pop(SETTINGS_VARIABLE))
    rank = rank_of(os.environ)
    if rank is None:
        sys.exit(f"rannc-run: the launcher set none of {', '.join(MPI_RANKS)}; the rank is unknown")
    os.environ.update(torch_variables(os.environ))
    stand_in = os.getpid()
    pid = os.fork()
    if pid != 0:
        _stand_in(pid)
    os.setsid()
    processes.die_with_parent(stand_in, signal.SIGTERM)
    _watch(settings, rank)


def _stand_in(watcher: int) -> NoReturn:
    """Be the process that the launcher sees: ends when the watcher ends, or when the launcher is gone."""
    ends = select.poll()
    try:
        ends.register(os.pidfd_open(os.getppid()), select.POLLIN)
        ends.register(os.pidfd_open(watcher), select.POLLIN)
        ends.poll()
    except OSError:  # a kernel before 5.3; the monitor watches the launcher, too
        os.waitpid(watcher, 0)
        os._exit(0)
    pid, status = os.waitpid(watcher, os.WNOHANG)
    os._exit(0 if pid == 0 else abs(os.waitstatus_to_exitcode(status)))


def _is_here(channel: socket.socket) -> bool:
    """Whether the other end of a connection is on this machine."""
    return channel.family == socket.AF_UNIX or channel.getsockname()[0] == channel.getpeername()[0]


def _watch(settings: dict[str, Any], rank: int) -> None:
    try:
        channel = connect(settings["address"], settings["token"])
    except OSError as error:
        sys.exit(f"rannc-run: rank {rank} on {host_name()} cannot reach {settings['address']}: {error}")
    log_dir = settings["log_dir"]
    if log_dir is not None:
        log_dir = os.path.join(log_dir, f"rank_{rank}")
    try:
        notes = bool(settings.get("notes"))
        # One on each machine but the monitor's own, where rannc-run listens itself.
        notices = notes and os.environ.get("LOCAL_RANK") == "0" and not _is_here(channel)
        command = _unshielded(sys.argv[1:])
        watcher = Watcher(channel, command, rank, settings["grace"], log_dir, notes=notes, notices=notices)
    except OSError as error:
        sys.exit(f"rannc-run: rank {rank} on {host_name()} cannot start: {error}")
    # The launcher waits until its pipes are closed; the watcher may outlive it by the grace period.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        watcher.run()
    except Exception:
        # Standard error is closed by now; the rank is killed with the watcher, and the user must know why.
        import traceback  # its import takes as long as all others

        channel.setblocking(True)
        channel.sendall(wire.encode(wire.STDERR, traceback.format_exc().encode()))
        raise
