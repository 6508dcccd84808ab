"""The monitor of a job: forwards signals and output, detects failures, and decides when the job is over.

One thread, one poll loop. Each rank's watcher (watcher.py) has one socket; while standard output is blocked, the
sockets are not read, and the ranks block as they would on a pipe.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection

from rannd.ranks.lost_host import LOOK_S, LOST_S, is_lost
from rannd.runner.watch import processes, wire
from rannd.runner.watch.errand import Errand, HeldPart
from rannd.runner.watch.job_result import JobResult, RankEnd
from rannd.runner.watch.line_channel import Listener, prepare
from rannd.runner.watch.notice_socket import decode_notice
from rannd.runner.watch.output import LineTagger, OutputQueue
from rannd.runner.watch.snapshot_rescue import Rescue

#: Maximum bytes of output to buffer for a slow reader before the ranks block.
_BACKLOG = 1 << 20
#: Bytes of the launcher's own messages to keep.
_LAUNCHER_TAIL = 64 << 10
_CHUNK = 256 << 10
_STDOUT, _STDERR = 1, 2
#: Seconds a launcher gets to exit after its last rank; and if a host is lost.
_LAUNCHER_EXIT = 10.0
_LOST_EXIT = 1.0
#: The same if no started rank is left.
_NOBODY_EXIT = 1.0
NO_ANSWER = f"no answer for {LOST_S} s; its network or the machine has failed"

#: Seconds after a failure in which the other ranks may say what they know of it, and clean up, before they are ended.
_LAST_WORDS_S = 1.0

#: Seconds since the epoch up to which C's localtime, and so the report, has a clock.
_LATEST = 1e11
_LOST_ERRORS = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
#: Seconds for which watchers that have just connected are waited for after the launcher has exited.
_HELLO_S = 5.0

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


class _Link:
    """The monitor's end of the socket to one watcher."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.reader = wire.FrameReader()
        self.rank = -1  # until its HELLO
        self.host = ""
        self.pid = 0
        self.local = channel.family == socket.AF_UNIX
        self.end: RankEnd | None = None
        self.done = False
        self.lost = False  # its host does not answer
        self.held: list[HeldPart] = []  # what its rank has left in memory
        self.streams: dict[bytes, tuple[int, LineTagger]] = {}

    def send(self, frame: bytes) -> None:
        # Orders are a few bytes; a watcher whose socket is full or closed notices that by itself.
        try:
            self.channel.send(frame)
        except OSError as exc:
            # The kernel reports it only once: reading returns a mere end of file after this.
            self.lost = self.lost or exc.errno in _LOST_ERRORS


class Monitor:
    """Runs the poll loop of one job.

    Args:
        listener: Socket that the watchers connect to.
        launcher: The running MPI launcher, with its standard output and error in a pipe.
        size: Number of ranks.
        shown: Ranks whose output is shown.
        grace: Seconds between SIGTERM and SIGKILL; the watchers use the same.
        start: Seconds within which every rank must start; 0: no limit.
        started: Called when the first rank has started; returns a line for the user, or ''.
        errand: What to do meanwhile. Then ranks get SIGUSR1 (save, and end) before SIGTERM.
    """

    def __init__(
        self,
        listener: Listener,
        launcher: subprocess.Popen[bytes],
        size: int,
        shown: Collection[int],
        grace: float,
        start: float = 0.0,
        started: Callable[[], str] = str,
        errand: Errand | None = None,
    ) -> None:
        self._reception = listener.reception(self._say)
        self._launcher = launcher
        self._size = size
        self._shown = shown
        self._grace = grace
        self._start = start
        self._started = started
        self._errand = errand
        self._start_by = time.monotonic() + start if start else None
        self._output = OutputQueue()
        self._links: dict[int, _Link] = {}  # by descriptor
        self._joined: dict[int, _Link] = {}  # by rank
        self._result = JobResult()
        self._launcher_tail = bytearray()
        self._stopping = 0  # the signal sent to all ranks, 0 while the job runs
        self._leaving = False  # ranks were asked to save and end by themselves
        self._stop_at: float | None = None  # after a failure, or for those that do not end by themselves
        self._kill_launcher_at: float | None = None
        self._launcher_asked = False  # it was sent SIGTERM by this monitor
        self._launcher_gone = False
        self._hello_by: float | None = None  # deadline for connections that are not admitted yet
        self._dismissed = False  # every watcher was sent QUIT
        self._rescue: Rescue | None = None  # watchers write what ranks have left in memory
        self._lost: set[str] = set()  # hosts that do not answer
        # On one machine the kernel reports the end of a process at once.
        self._look_at = None if listener.address[0] == "unix" else time.monotonic() + LOOK_S
        self._wakeup = -1

    def run(self) -> JobResult:
        """Run until no process of the job is left.

        Meanwhile SIGINT, SIGTERM and SIGHUP end the job, a second one immediately, and SIGUSR1 and SIGUSR2 are
        forwarded to the ranks. The previous handlers are restored.
        """
        self._wakeup, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        handlers = {}
        for signum in (*_ENDING, *_FORWARDED, signal.SIGCHLD):
            # Signals that the shell had ignored (nohup, background jobs) stay ignored.
            if signum == signal.SIGCHLD or signal.getsignal(signum) != signal.SIG_IGN:
                handlers[signum] = signal.signal(signum, lambda *_: None)
        previous = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        assert self._launcher.stdout is not None
        os.set_blocking(self._launcher.stdout.fileno(), False)
        try:
            while not self._over():
                self._turn()
            self._close()
        finally:
            signal.set_wakeup_fd(previous)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            os.close(self._wakeup)
            os.close(write_end)
        self._result.ends.sort(key=lambda end: end.time)
        self._result.launcher_status = self._launcher.returncode
        self._result.missing = self._size - len(self._joined)
        self._result.launcher_output = self._launcher_tail.decode(errors="replace")
        return self._result

    def _over(self) -> bool:
        if self._launcher.poll() is None:
            return False
        self._accept()  # a watcher may have connected just before
        late = self._launcher_gone and self._hello_by is None
        return not self._links and not self._output.pending and (late or not self._reception.waiting)

    # --- one turn -------------------------------------------------------------------------------

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        poll.register(self._reception, select.POLLIN)
        if self._output.waiting_for is not None:
            poll.register(self._output.waiting_for, select.POLLOUT)
        if self._output.pending < _BACKLOG:
            for fd in self._links:
                poll.register(fd, select.POLLIN)
        launcher_pipe = self._launcher.stdout
        if launcher_pipe is not None and not launcher_pipe.closed:
            poll.register(launcher_pipe, select.POLLIN)
        moments = (self._stop_at, self._kill_launcher_at, self._start_by, self._look_at, self._hello_by)
        due = [moment for moment in moments if moment is not None]
        if self._errand is not None and not self._stopping and self._rescue is None:
            due.append(self._errand.due())
        if self._rescue is not None and not self._rescue.over:
            due.append(self._rescue.by)
        pauses = [max(0.0, moment - time.monotonic()) for moment in due]
        if (pause := self._reception.due()) is not None:
            pauses.append(pause)
        ready = {fd for fd, _ in poll.poll(min(pauses) * 1000 if pauses else None)}

        if self._wakeup in ready:
            self._take_signals(os.read(self._wakeup, 4096))
        if self._output.waiting_for in ready:
            self._output.pump()
            if _STDOUT in self._output.broken:
                self._end_job(signal.SIGPIPE)
        self._accept()
        for fd in [fd for fd in self._links if fd in ready]:
            self._receive(self._links[fd])
        if launcher_pipe is not None and not launcher_pipe.closed and launcher_pipe.fileno() in ready:
            self._hear_launcher()
        idle = self._stopping or self._rescue is not None  # no rank is left that could be asked to leave
        if self._errand is not None and not idle and time.monotonic() >= self._errand.due():
            self._errand.run(self._leave)
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self._stop(signal.SIGTERM)
        if self._rescue is not None and not self._rescue.over and time.monotonic() >= self._rescue.by:
            self._rescue.give_up("it takes too long (--leave-timeout)")
            self._dismiss_if_over()
        self._look_after_launcher()
        self._look_for_starts()
        if self._hello_by is not None and time.monotonic() >= self._hello_by:
            self._hello_by = None
        if self._look_at is not None and time.monotonic() >= self._look_at:
            self._look_for_hosts()

    def _look_for_hosts(self) -> None:
        """Check whether the hosts of the watchers still answer."""
        self._look_at = time.monotonic() + LOOK_S
        for link in [*self._links.values()]:
            if is_lost(link.channel, reads_at_once=True):
                self._part(link, lost=True)

    def _look_for_starts(self) -> None:
        """End a job whose ranks do not all start: a host does not answer, or a launcher waits for a password."""
        if self._start_by is None or (len(self._joined) < self._size and time.monotonic() < self._start_by):
            return
        self._start_by = None
        if len(self._joined) < self._size and not self._stopping:
            there = len(self._joined)
            self._result.late = True
            self._say(
                f"only {there} of {self._size} ranks have started within {self._start:g} s: ending the job. Is every "
                "host reachable without a password? (--timeout-start S for more time)"
            )
            self._stop(signal.SIGTERM)

    def _take_signals(self, received: bytes) -> None:
        for signum in received:
            if signum in _ENDING or (signum == signal.SIGUSR1 and self._errand is not None):
                self._end_job(signum)
            elif signum in _FORWARDED:
                self._tell_all(wire.encode_json(wire.SIGNAL, signal=signum))

    def _end_job(self, signum: int) -> None:
        """End the job on a signal from outside; on the second one with SIGKILL."""
        if self._rescue is not None and not self._rescue.over:
            self._hurry_rescue(signum)
            return
        if self._result.signal == 0 and not self._stopping:
            self._result.signal = signum
            ranks = "1 rank" if self._size == 1 else f"{self._size} ranks"
            if self._errand is not None and signum in (signal.SIGTERM, signal.SIGUSR1):
                name = signal.Signals(signum).name
                self._say(f"{name}: {ranks} may save and end by themselves, for {self._errand.leave_s:g} s")
                self._leave(self._errand.leave_s)
                return
            self._say(f"{signal.Signals(signum).name}: ending {ranks}, SIGKILL after {self._grace:g} s")
            self._stop(signal.SIGTERM if signum == signal.SIGPIPE else signum)
        elif signum == signal.SIGTERM and self._result.signal == signal.SIGUSR1 and not self._stopping:
            self._result.signal = signum  # batch systems send a notice, and end the job later
            self._stop(signum)
        elif signum not in (signal.SIGPIPE, signal.SIGUSR1):
            self._output.drop()  # its reader may be what hangs
            self._say(f"{signal.Signals(signum).name} again: SIGKILL for every rank now")
            self._tell_all(wire.encode(wire.KILL))
            self._kill_launcher_at = time.monotonic() + 1.0

    def _hurry_rescue(self, signum: int) -> None:
        """End a job whose ranks have ended, and in which what they have kept is being written."""
        assert self._rescue is not None
        assert self._errand is not None
        name, first = signal.Signals(signum).name, self._result.signal == 0
        self._result.signal = self._result.signal or signum
        if first and signum in (signal.SIGTERM, signal.SIGUSR1):
            self._say(f"{name}: saving may take {self._errand.leave_s:g} s more")
            self._rescue.hurry(self._errand.leave_s)
        elif signum != signal.SIGUSR1:
            self._rescue.give_up(f"{name} has ended it")
            self._dismiss_if_over()

    def _leave(self, seconds: float) -> None:
        """Ask every rank to save and to end by itself within `seconds`."""
        if self._stopping:
            return
        if not self._leaving:
            self._tell_all(wire.encode_json(wire.SIGNAL, signal=signal.SIGUSR1))
        self._leaving = True
        self._stop_soon(seconds)

    def _stop_soon(self, seconds: float) -> None:
        """Ask every rank to end after `seconds` at most."""
        moment = time.monotonic() + seconds
        self._stop_at = moment if self._stop_at is None else min(moment, self._stop_at)

    def _stop(self, signum: int) -> None:
        """Ask every rank to end; the watchers send SIGKILL after the grace period."""
        self._stop_at = None
        if self._stopping:
            return
        self._stopping = signum
        self._tell_all(wire.encode_json(wire.STOP, signal=signum))
        # Ranks are ended by their watchers; this is for a launcher that still starts ranks, or hangs.
        running = any(not link.done for link in self._joined.values())
        wait = self._grace + _LAUNCHER_EXIT if running else _NOBODY_EXIT
        self._kill_launcher_at = time.monotonic() + wait

    def _tell_all(self, frame: bytes) -> None:
        for link in self._joined.values():
            if not link.done:
                link.send(frame)

    def _say(self, message: str) -> None:
        self._output.write(_STDERR, f"rannc-run: {message}\n".encode())

    # --- watchers -------------------------------------------------------------------------------

    def _accept(self) -> None:
        for channel in self._reception.admit():
            if prepare(channel):
                self._links[channel.fileno()] = _Link(channel)
            else:
                channel.close()

    def _receive(self, link: _Link) -> None:
        lost = link.lost
        try:
            data = link.channel.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as exc:
            data = b""
            # Not after a reset: then the host's kernel has answered.
            lost = lost or exc.errno in _LOST_ERRORS
        if not data:
            self._part(link, lost=lost)
            return
        try:
            for kind, payload in link.reader.feed(data):
                self._take_frame(link, kind, payload)
        except (wire.WireError, LookupError, TypeError, ValueError, ArithmeticError):
            # No watcher sends this: nothing that it sent is used.
            self._part(link)

    def _take_frame(self, link: _Link, kind: bytes, payload: bytes) -> None:
        if link.rank < 0:
            self._meet(link, kind, payload)
        elif kind in link.streams:
            fd, tagger = link.streams[kind]
            self._output.write(fd, tagger.feed(payload))
        elif kind == wire.EXIT:
            self._take_end(link, payload)
        elif kind == wire.NOTE and self._errand is not None:
            self._errand.take_note(wire.decode_json(payload))
        elif kind == wire.NOTICE and self._errand is not None:
            answer = self._errand.take_notice(decode_notice(payload), link.rank)
            link.send(wire.encode_json(wire.NOTICED, **answer._asdict()))
        elif kind == wire.DONE:
            link.held = [HeldPart(**each) for each in wire.decode_json(payload)["held"]]
            self._flush(link)
            link.done = True
            self._dismiss_if_over()
        elif kind == wire.WROTE and self._rescue is not None:
            error = str(wire.decode_json(payload)["error"])
            self._rescue.take(link.rank, error and f"{link.host}: {error}")
            self._dismiss_if_over()

    def _meet(self, link: _Link, kind: bytes, payload: bytes) -> None:
        if kind != wire.HELLO:
            raise wire.WireError(f"{kind!r} before HELLO")
        hello = wire.decode_json(payload)
        rank = int(hello["rank"])
        if rank in self._joined or not 0 <= rank < self._size:
            raise wire.WireError(f"rank {rank} is there already, or not of this job")
        link.rank, link.host, link.pid = rank, str(hello["host"]), int(hello["pid"])
        if not self._joined and (line := self._started()):
            self._say(line)
        self._joined[rank] = link
        if rank in self._shown:
            prefix = f"[{link.host}:{rank}] ".encode() if len(self._shown) > 1 else b""
            link.streams = {
                wire.STDOUT: (_STDOUT, LineTagger(prefix)),
                wire.STDERR: (_STDERR, LineTagger(prefix)),
            }
        if self._stopping:
            link.send(wire.encode_json(wire.STOP, signal=self._stopping))
        elif self._leaving:  # it has done nothing yet that could be saved
            link.send(wire.encode_json(wire.SIGNAL, signal=signal.SIGUSR1))

    def _take_end(self, link: _Link, payload: bytes) -> None:
        fields = wire.decode_json(payload)
        status, moment = int(fields["status"]), float(fields["time"])
        if not 0 <= moment <= _LATEST:  # no NaN either
            raise wire.WireError(f"a rank has ended at {moment}")
        link.end = RankEnd(
            rank=link.rank,
            host=link.host,
            pid=link.pid,
            status=status,
            time=moment,
            tail=str(fields["tail"]),
            ordered=_obeyed(status, int(fields["ordered"])),
        )
        self._result.ends.append(link.end)
        if fields["leftovers"]:
            self._say(f"rank {link.rank} on {link.host} left processes behind, ending {', '.join(fields['leftovers'])}")
        if status != 0 and not self._stopping:
            self._stop_soon(_LAST_WORDS_S)

    def _flush(self, link: _Link) -> None:
        for fd, tagger in link.streams.values():
            self._output.write(fd, tagger.flush())

    def _dismiss_if_over(self) -> None:
        if not all(link.done for link in self._joined.values()):
            return
        if len(self._joined) < self._size and self._launcher.poll() is None:
            if self._stopping and self._kill_launcher_at is not None:
                self._kill_launcher_at = min(self._kill_launcher_at, time.monotonic() + _NOBODY_EXIT)
            return  # more ranks are to start
        if not self._dismissed and self._begin_rescue():
            return
        for link in self._joined.values():
            link.send(wire.encode(wire.QUIT))
        # A launcher would wait for the processes of a lost host for ever.
        self._dismissed = True
        self._stop_at = None  # nobody is left to be ended
        self._kill_launcher_at = time.monotonic() + (_LOST_EXIT if self._lost else _LAUNCHER_EXIT)

    def _begin_rescue(self) -> bool:
        """Let the watchers write what ranks have left in memory, if that is worth it; whether they do."""
        if self._errand is None:
            return False
        if self._rescue is None and not self._result.signal:
            failed = any(end.status != 0 or end.lost for end in self._result.ends)
            there = {link.rank: link.held for link in self._links.values() if link.held}
            order = self._errand.plan_rescue(there, failed=failed)
            if order is not None:
                self._stop_at = self._kill_launcher_at = None  # it ends with the watchers; srun would take them along

                def ask(watcher: int, part: int) -> None:
                    fields = {"number": order.number, "rank": part, "folder": order.folder}
                    self._joined[watcher].send(wire.encode_json(wire.RESCUE, **fields))

                self._rescue = Rescue(order, ask, self._errand.rescue_s)
        if self._rescue is None:
            return False
        if self._rescue.over:
            self._errand.end_rescue(self._rescue.order, self._rescue.error)
        return not self._rescue.over

    def _part(self, link: _Link, *, lost: bool = False) -> None:
        """Handle a closed socket to a watcher; `lost`: its host does not answer."""
        del self._links[link.channel.fileno()]
        link.channel.close()
        if link.rank < 0 and not self._stopping:
            self._say("lost the process that watches a rank before it had told which rank: ending the job")
            self._stop(signal.SIGTERM)
        if self._rescue is not None and not self._rescue.over:
            self._rescue.lose(link.rank, f"{link.host}: {NO_ANSWER if lost else 'its watcher was killed'}")
            self._dismiss_if_over()
        if link.rank < 0 or link.done:
            return
        # The watcher itself was killed. The kernel has killed the rank with it; what the rank forked is killed here.
        if link.local:
            processes.kill_session(link.pid)
        self._flush(link)
        link.done = True
        if lost:
            self._lose_host(link.host)
        if link.end is None:
            reason = NO_ANSWER if lost else "the process that watches this rank was killed"
            ordered = self._stopping != 0 and not lost
            moment = time.time() - LOST_S if lost else time.time()
            link.end = RankEnd(link.rank, link.host, link.pid, -signal.SIGKILL, moment, reason, ordered, lost)
            self._result.ends.append(link.end)
            self._stop(signal.SIGTERM)
        self._dismiss_if_over()

    def _lose_host(self, host: str) -> None:
        if host not in self._lost:
            self._lost.add(host)
            self._say(f"host {host} is lost: {NO_ANSWER}; ending the job")

    # --- the launcher ---------------------------------------------------------------------------

    def _hear_launcher(self) -> bool:
        """Store the launcher's output; return False if there is none, for now or at its end."""
        assert self._launcher.stdout is not None
        try:
            data = os.read(self._launcher.stdout.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._launcher.stdout.close()
            return False
        self._launcher_tail += data
        del self._launcher_tail[:-_LAUNCHER_TAIL]
        return True

    def _look_after_launcher(self) -> None:
        if self._launcher.poll() is not None:
            self._kill_launcher_at = None
            if not self._launcher_gone:
                self._launcher_gone = True
                self._hello_by = time.monotonic() + _HELLO_S
                # Watchers on this host notice it themselves; those on other hosts are told here.
                if not all(link.done for link in self._joined.values()):
                    self._stop(signal.SIGTERM)
                self._dismiss_if_over()
                self._kill_launcher_at = None
        elif self._kill_launcher_at is not None and time.monotonic() >= self._kill_launcher_at:
            # SIGTERM first: the launcher may still clean up on other hosts.
            self._launcher.send_signal(signal.SIGKILL if self._launcher_asked else signal.SIGTERM)
            self._launcher_asked = True
            self._kill_launcher_at = time.monotonic() + (_LOST_EXIT if self._dismissed and self._lost else self._grace)

    def _close(self) -> None:
        self._accept()
        for link in self._links.values():
            link.channel.close()
        self._reception.close()
        if self._launcher.stdout is not None and not self._launcher.stdout.closed:
            while self._hear_launcher():
                pass
            self._launcher.stdout.close()


def _obeyed(status: int, ordered: int) -> bool:
    """Whether a rank ended by the signal it was told to end with, as a signal or as Python's exit after Ctrl-C."""
    if ordered == 0:
        return False
    return status == -ordered or status == 128 + ordered
