"""Failure detector of each rank: reports its failures to the other ranks, and aborts waits for ranks that failed.

    with world.watch.inside("forward"):     # around everything that is collective
        ...

An exception that leaves such a block is sent to all ranks (rannd.runtime.failure.coordinator), keeps its type and
traceback, and gets a note that names its position. On the other ranks the watcher thread logs it and shuts down the
rank's connections, so that a thread blocked in a transfer raises; the block then raises a RankFailedError that
describes the first rank's failure. From then on the ranks are out of sync, and every later block raises it again.

An error that all ranks raise before they run anything (a wrong call, a model that cannot be traced) leaves them in
sync. The watcher thread sleeps in `select`; a block costs two method calls.

All threads share the script's position (torch runs backward in threads of its own) but a saver, which communicates on
its own process group while the script goes on: `beside` gives its thread a position of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec

from rannd import log
from rannd.errors import CheckpointError, RankFailedError, StepError
from rannd.profile.out_of_memory import is_out_of_memory
from rannd.ranks.admission import new_token
from rannd.ranks.host_name import host_name
from rannd.runtime.failure import late_error, stack_dump, thread_stacks, wait_notice
from rannd.runtime.failure.connections import Connections
from rannd.runtime.failure.coordinator import ANSWER_S, GRACE_S, Hub
from rannd.runtime.failure.failure_report import Failure, failure_of, is_broken
from rannd.runtime.failure.position import Where
from rannd.runtime.failure.side_channel import (
    Ask,
    Channel,
    ChannelError,
    Forgiven,
    Gone,
    Heard,
    Left,
    RankHello,
    Stacks,
    Stuck,
    Told,
    Waits,
    addresses,
    connect,
    listen,
)

NEWS_S = 3.0
"""Maximum seconds to wait for the failure report after a connection broke."""
LEFT_S = 0.5
"""The same if a rank has left the job normally, which explains the broken connection already."""
HEARD_S = 3.0
"""Maximum seconds that the failed rank waits before it exits until all others have reported the failure."""
FIRST_S = 5.0
"""Maximum seconds that other ranks wait for the failed one to exit first, so that launchers report that one."""
STUBBORN_S = 20.0
"""Seconds after a failure elsewhere until a rank that neither raises nor makes progress is killed."""
MOST_CHECK_S = 5.0
"""Maximum seconds between two checks of the watchdog."""

ANEW = "the ranks are out of sync; restart the job"


class PromisedMemory(Protocol):
    """Memory estimate of a plan, see `rannd.runtime.planning.memory_promise`."""

    def marks(self, stage: int | None) -> dict[str, Any]:
        """Fields of a Failure that name the deployment and the memory limit of the next plan."""

    def text(self, exc: BaseException, stage: int | None) -> str:
        """Message with the memory planned, requested and available, and what to do."""

    def mark(self, failure: Failure) -> None:
        """Invalidate the cached deployment, and let the next run plan for less memory."""


class FailureDetector:
    """Failure detector of this process, one per world; without other ranks it only adds notes to errors."""

    def __init__(self, connections: Connections | None = None) -> None:
        self.where = Where()
        """Position of the script."""
        self._beside: dict[int, Where] = {}
        """Positions of the threads in `beside`, by thread."""
        self.connections = connections if connections is not None else Connections()
        self.promises: dict[str, PromisedMemory] = {}
        """Memory estimates of plans, by `Promise.digest`."""
        self.promise: PromisedMemory | None = None
        """Memory estimate of the model being called."""
        self.stages: dict[int, tuple[int, ...]] = {}
        """Stages of each rank in the last deployment."""
        self.outstanding: Callable[[], bool] = lambda: False
        """Whether the device has not done yet what the last call gave it."""
        self.failure: Failure | None = None
        """The failure that ended the job."""
        self._rank, self._host, self._pid = 0, host_name(), os.getpid()
        self._hosts: tuple[str, ...] = (self._host,)
        self._channel: Channel | None = None
        self._hub: Hub | None = None
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector | None = None
        self._wakeup: tuple[int, int] | None = None
        self._ending = False
        self._own: Failure | None = None
        self._connected = threading.Event()
        self._news = threading.Event()
        self._verdict = threading.Event()
        self._heard = threading.Event()
        self._gone: dict[int, threading.Event] = {}
        self._left: dict[int, int] = {}
        self._scripts_ended = threading.Event()
        """Those of all ranks have, or the job has failed."""
        self._kill_deadline: tuple[float, int] | None = None
        self._blocks_others = False
        """Whether the other ranks are waiting for this rank in a hang."""
        self._timeout = 0.0
        self._notice = 0.0
        self._noticed = False
        """Whether the current wait was told, or is being told."""
        self._still: tuple[float, tuple[object, ...]] | None = None
        self._asked_at: float | None = None

    # -- starting ---------------------------------------------------------------------------------------------

    def await_ranks(self, rank: int, size: int, notice_s: float) -> None:
        """Start the watcher thread; until `start` it only tells a wait for the other ranks.

        Args:
            rank: This rank.
            size: Number of ranks.
            notice_s: Seconds of waiting after which one line of the log says who waits for whom; 0: never.
        """
        self._notice = notice_s
        self.where.thread = threading.get_ident()
        thread_stacks.note()

        def run() -> None:
            # Two ranks tell, one of which waits: all of them would fill the log.
            if not self._connected.wait(notice_s if notice_s and rank < 2 else None):
                log.get("RaNNCProcess").warning("%s", wait_notice.of_connecting(rank, size, self.where))
                self._connected.wait()
            if self._channel is not None:
                self._run()

        self._thread = threading.Thread(target=run, name="rannd-watch", daemon=True)
        self._thread.start()

    def start(
        self,
        rank: int,
        hosts: Sequence[str],
        alone: bool,
        broadcast: Callable[[bytes | None], bytes],
        watchdog_s: float,
    ) -> None:
        """Connect the ranks, after `await_ranks`. Collective.

        Args:
            rank: This rank.
            hosts: Host names of all ranks.
            alone: All ranks are on one machine.
            broadcast: Broadcasts rank 0's bytes to all ranks.
            watchdog_s: Seconds of waiting for other ranks that count as a hang; 0: no watchdog.
        """
        self._rank, self._host, self._timeout = rank, hosts[rank], watchdog_s
        self._hosts = tuple(hosts)
        self._gone = {number: threading.Event() for number in range(len(hosts))}
        self._selector = selectors.DefaultSelector()
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wakeup[0], selectors.EVENT_READ, lambda: None)
        if rank == 0:
            listener = listen(alone)
            token = new_token()
            told = (token, addresses(alone), listener.getsockname()[1])
            broadcast(msgspec.msgpack.encode(told))
            self._hub = Hub(len(hosts), token, listener, self._selector)
            mine, its = socket.socketpair()
            self._hub.adopt(Channel(its))
            self._channel = Channel(mine)
        else:
            token, places, port = msgspec.msgpack.decode(broadcast(None), type=tuple[str, list[str], int])
            self._channel = connect(places, port, token)
            if self._channel is None:
                log.get("RaNNCProcess").warning(
                    "rank %d cannot connect to any of %s, port %d: it will learn late of failed ranks (set "
                    "GLOO_SOCKET_IFNAME to the network interface to use)",
                    rank,
                    ", ".join(places),
                    port,
                )
        if self._channel is not None:
            self._channel.send(RankHello(rank, self._host, self._pid))
            self._selector.register(self._channel.socket, selectors.EVENT_READ, self._hear)
        self._connected.set()
        self._hook()
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forked)

    def _hook(self) -> None:
        before = sys.excepthook

        def hook(kind: type[BaseException], exc: BaseException, trace: TracebackType | None) -> None:
            if self._pid == os.getpid():
                self._uncaught(exc)
            before(kind, exc, trace)

        sys.excepthook = hook

    def _forked(self) -> None:
        """Reset a forked child (e.g. a DataLoader worker): it is no rank, and must not hold its connections."""
        if self._channel is not None:
            self._channel.close()
        if self._hub is not None:
            self._hub.forget()
        self._channel, self._hub, self._thread = None, None, None
        self.failure, self._own, self.where.depth = None, None, 0
        self._beside.clear()

    # -- blocks -----------------------------------------------------------------------------------------------

    def inside(self, call: str) -> Inside:
        """Context manager for a block that communicates with other ranks; `call` names it in messages."""
        return Inside(self, call)

    @contextlib.contextmanager
    def beside(self, call: str) -> Iterator[None]:
        """A block of `inside` in a thread that communicates, on a process group of its own, while the script goes on.

        Errors that leave it fail the job, but for a CheckpointError, which all ranks raise.
        """
        where = self._beside[threading.get_ident()] = Where()
        agreed: CheckpointError | None = None
        try:
            with self.inside(call):
                where.preparing = True
                try:
                    yield
                except CheckpointError as exc:
                    agreed = exc
        finally:
            del self._beside[threading.get_ident()]
        if agreed is not None:
            raise agreed

    def _here(self) -> Where:
        """Position of the calling thread."""
        return self._beside.get(threading.get_ident(), self.where)

    def _waited_for(self) -> Where:
        """Position of the thread on which it depends whether the script goes on: its own, or a saver that it joins."""
        beside = tuple(self._beside.values())
        return beside[0] if beside and stack_dump.joins(self.where) else self.where

    def _doing(self, where: Where) -> str:
        """As `stack_dump.doing`; a script that reads a device which is not done waits as the device does."""
        found = stack_dump.doing(where)
        return "waiting" if found == "script" and self.outstanding() else found

    def enter(self, call: str) -> None:
        """Enter a block of `inside`; raises RankFailedError if the job has failed."""
        where = self._here()
        if where.depth == 0:
            if self._own is not None and self._channel is not None and self.failure is None:
                self._verdict.wait(GRACE_S + NEWS_S)
            if self.failure is not None:
                raise self._again(self.failure)
            where.call, where.thread, where.user_line = call, threading.get_ident(), stack_dump.line_of_caller()
            where.calls += 1
            thread_stacks.note()
        where.turns += 1
        where.depth += 1

    def ensure_intact(self) -> None:
        """RankFailedError if another rank has failed: what came from the device may be garbage then.

        Transfers that were aborted on a device end like any others.
        """
        if self.failure is not None and self.failure.rank != self._rank:
            raise self._elsewhere(self.failure, self._here())

    def leave(self, exc: BaseException | None) -> None:
        """Leave a block of `inside`; may raise a RankFailedError or StepError instead of `exc`."""
        where = self._here()
        where.depth -= 1
        try:
            if exc is not None:
                self._failed(exc, where)
        finally:
            if where.depth == 0:
                where.call, where.user_line, where.piece, where.action, where.preparing = "", "", None, None, False

    def _failed(self, exc: BaseException, where: Where) -> None:
        if isinstance(exc, RankFailedError | GeneratorExit) or getattr(exc, "_rannd_told", False):
            return
        if isinstance(exc, SystemExit) and exc.code in (None, 0):
            return
        if is_broken(exc) and not is_out_of_memory(exc):
            if self._channel is not None:
                self._news.wait(NEWS_S if not self._left else LEFT_S)
            told = self.failure
            # A saver's connection that breaks because this rank's script has failed is not the saver's failure.
            if told is not None and (told.rank != self._rank or told.kind == "hang" or where is not self.where):
                raise self._elsewhere(told, where) from None
            lost = StepError(f"a connection to another rank broke in {where.words()}: {self._lost(where)}")
            self._tell(lost, where)
            raise lost from exc
        self._tell(exc, where)

    def _lost(self, where: Where) -> str:
        left = [f"rank {rank} has ended its script" for rank in sorted(self._left)]
        why = "; ".join(left) or "another rank is gone, or cannot be reached any more"
        told = wait_notice.collective(stack_dump.entry(where))
        return f"{why}; {told or 'every rank has to call the model, and backward, equally often'}"

    def _tell(self, exc: BaseException, where: Where) -> None:
        """Add a note to an error of this rank, and report it to the other ranks."""
        failure = failure_of(exc, where, rank=self._rank, host=self._host, pid=self._pid)
        if is_out_of_memory(exc):
            failure = msgspec.structs.replace(failure, kind="memory", certain=True)
            if self.promise is not None:
                exc.add_note("rannd: " + self.promise.text(exc, where.stage))
                failure = msgspec.structs.replace(failure, **self.promise.marks(where.stage))
        if failure.stage is not None or failure.action or failure.kind == "memory" or self._channel is not None:
            exc.add_note(f"rannd: this was rank {self._rank}, {failure.place}")
        with contextlib.suppress(AttributeError):
            exc._rannd_told = True  # type: ignore[attr-defined]
        if failure.kind == "memory":
            self._mark(failure)
        if self.failure is None:
            self._own = failure
            self._verdict.clear()
            if self._channel is not None:
                self._channel.send(Told(failure))

    def _uncaught(self, exc: BaseException) -> None:
        """Report an uncaught exception of the script."""
        if self.failure is not None and self.failure.rank != self._rank:
            if is_broken(exc):
                exc.add_note(f"rannd: {self.failure.words()}")
        elif not getattr(exc, "_rannd_told", False) and not isinstance(exc, RankFailedError):
            self._tell(exc, self.where)

    def _elsewhere(self, failure: Failure, where: Where) -> RankFailedError:
        return RankFailedError(f"{failure.words()} (this is rank {self._rank}, in {where.words()})", failure.rank)

    def _again(self, failure: Failure) -> RankFailedError:
        return RankFailedError(f"{failure.words()}; {ANEW}", failure.rank)

    def _mark(self, failure: Failure) -> None:
        """Invalidate the cached plan that ran out of memory."""
        promise = self.promises.get(failure.deployment)
        if promise is not None:
            try:
                promise.mark(failure)
            except Exception as exc:  # a failing cache must not hide the error itself
                log.get("RaNNCProcess").warning("the cached deployment cannot be marked: %s", exc)

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._selector is not None
        log.PHASES.ticked = bool(self._timeout or self._notice)  # else this thread may sleep for long
        try:
            while not self._ending:
                for key, _ in self._selector.select(self._pause()):
                    key.data()
                log.PHASES.tick()
                if self._hub is not None:
                    self._hub.tick()
                self._check_progress()
        except Exception as exc:  # a failing watcher must be logged, but must not end the training
            log.get("RaNNCProcess").exception("the failure detector of rank %d has stopped: %s", self._rank, exc)
        finally:
            log.PHASES.ticked = False
        for _ in range(2):  # this rank's own Left message may still be on its way to the hub
            for key, _ in self._selector.select(0):
                key.data()

    def _pause(self) -> float | None:
        pauses = [self._hub.due()] if self._hub is not None else []
        limits = [limit for limit in (self._timeout, self._notice) if limit]
        if limits and self.failure is None:
            pauses.append(min(max(min(limits) / 8, 0.1), MOST_CHECK_S))
        if self._kill_deadline is not None:
            pauses.append(1.0)
        found = [pause for pause in pauses if pause is not None]
        return min(found) if found else None

    def _hear(self) -> None:
        assert self._channel is not None
        assert self._selector is not None
        try:
            messages = self._channel.receive()
        except ChannelError as exc:
            log.get("RaNNCProcess").warning("rank %d got an invalid message from rank 0: %s", self._rank, exc)
            messages = None
        if messages is None:
            self._selector.unregister(self._channel.socket)
            self._ending = self._kill_deadline is None
            if 0 not in self._left and self.failure is None:
                why = "it was killed, or crashed outside Python (out of memory?), or its machine is gone"
                self._take(Failure(0, self._hosts[0], 0, "gone", "", why))
                self._ending = False
            for event in self._gone.values():
                event.set()
            self._heard.set()
            self._verdict.set()
            self._scripts_ended.set()
            return
        for message in messages:
            if isinstance(message, Told):
                self._take(message.failure)
            elif isinstance(message, Forgiven):
                self._own = None
                self._verdict.set()
            elif isinstance(message, Left):
                self._left[message.rank] = message.calls
            elif isinstance(message, Gone):
                self._gone[message.rank].set()
            elif isinstance(message, Heard):
                self._heard.set()
            elif isinstance(message, Ask):
                self._answer(message)
        if all(rank in self._left or gone.is_set() for rank, gone in self._gone.items()):
            self._scripts_ended.set()

    def _take(self, failure: Failure) -> None:
        """Handle the failure of the job: log it, acknowledge it, and shut down connections."""
        if self.failure is not None:
            return
        if failure.kind == "gone":
            failure = msgspec.structs.replace(failure, runs=self.stages.get(failure.rank, ()))
        self.failure = failure
        self._asked_at = None
        if failure.rank != self._rank or failure.kind == "hang":
            if self._own is None:
                stopped = failure.error == KeyboardInterrupt.__name__  # by Ctrl-C, which all ranks get
                log.get("RaNNCProcess").log(logging.DEBUG if stopped else logging.ERROR, "%s", failure.words())
            if failure.kind == "memory":
                self._mark(failure)
            self._blocks_others = failure.kind == "hang" and self._doing(self._waited_for()) != "waiting"
            if self.where.call or self._blocks_others:
                self._kill_deadline = (time.monotonic() + STUBBORN_S, self.where.calls)
        if self._channel is not None:
            self._channel.send(Heard())
        self._news.set()
        self._verdict.set()
        self._scripts_ended.set()
        self.connections.cut()

    def _answer(self, ask: Ask) -> None:
        assert self._channel is not None
        where, still = self._waited_for(), 0.0
        if self._still is not None and self._still[1] == stack_dump.progress(where):
            still = time.monotonic() - self._still[0]
        doing = self._doing(where)
        self._channel.send(
            Stacks(
                ask.number,
                doing,
                where.words(),
                stack_dump.line(where),
                stack_dump.dump()[: 1 << 20] if ask.stacks else "",
                "" if doing == "script" else stack_dump.entry(where),
                stack_dump.user_line(where),
                stack_dump.activity(where),
                still,
            )
        )
        self._noticed = True  # the line for this question names this rank, too
        self._asked_at = None  # rank 0 answers

    def _check_progress(self) -> None:
        """Watchdog: check whether this rank waits for others, hangs, or ignores a failure elsewhere."""
        now = time.monotonic()
        if self._kill_deadline is not None:
            end, calls = self._kill_deadline
            if self.where.calls != calls or not (self.where.call or self._blocks_others):
                self._kill_deadline = None
            elif now >= end:
                self._kill()
        if not (self._timeout or self._notice) or self.failure is not None or self._channel is None:
            return
        if self._asked_at is not None and now >= self._asked_at + 2 * ANSWER_S:
            self._asked_at = None
            error = f"no progress for {self._timeout:g} s (watchdog_timeout_s), and rank 0 does not answer"
            self._take(Failure(0, self._hosts[0], 0, "hang", "", error))
            return
        where = self._waited_for()
        here = stack_dump.progress(where)
        if self._still is None or self._still[1] != here or self._doing(where) != "waiting":
            self._still = (now, here)
            self._asked_at, self._noticed = None, False
            return
        waited = now - self._still[0]
        if self._timeout and waited >= self._timeout:
            self._channel.send(Stuck(self._rank, waited))
            self._asked_at = self._asked_at or now
        elif self._notice and waited >= self._notice and not self._noticed:
            self._channel.send(Waits(self._rank))
            self._noticed = True

    def _kill(self) -> None:
        """Kill this process because it does not react to a failure elsewhere."""
        assert self.failure is not None
        text = (
            f"rannd: rank {self._rank} does not return from {self.where.words()} and is killed now, because "
            f"{self.failure.words()}\n{stack_dump.dump()}"
        )
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(StepError.exit_code)

    # -- ending -----------------------------------------------------------------------------------------------

    def _at_exit(self) -> None:
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends waiting for others; Python would print a traceback
            self._leave()

    def _leave(self) -> None:
        """At exit: send Left, or make sure that the failure is reported on all ranks; the failed rank exits first."""
        if self._pid != os.getpid() or self._channel is None:
            return
        last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(last, BaseException):
            self._uncaught(last)  # in case the script has replaced sys.excepthook
        if self._own is not None and not self._own.certain and self.failure is None:
            self._verdict.wait(LEFT_S if isinstance(last, BaseException) else GRACE_S + LEFT_S)
            own = self._own
            if own is not None and self.failure is None:
                self._channel.send(Told(msgspec.structs.replace(own, certain=True)))
        if self._own is None and self.failure is None:
            self._channel.send(Left(self._rank, self.where.calls))
            if late_error.known() is not None:  # an error on all ranks: the launcher, once told, ends those that work
                # As after its exit: who calls a collective once more does not wait for this rank.
                self.connections.cut()
                while not self._scripts_ended.wait(1) and self._thread is not None and self._thread.is_alive():
                    pass  # a watcher thread that has stopped sets no event
        elif self._own is not None:
            self._verdict.wait(HEARD_S)
            if self.failure is None or self.failure.rank == self._rank:
                self._heard.wait(HEARD_S)
        elif self.failure is not None:
            self._gone[self.failure.rank].wait(FIRST_S)
        self._ending = True
        if self._wakeup is not None:
            os.write(self._wakeup[1], b"x")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(HEARD_S)
        # The connections must end with the process, not before: other ranks take their end for its end.
        self._channel.socket.detach()
        if self._hub is not None:
            self._hub.detach()


class Inside:
    """Context manager returned by `FailureDetector.inside`."""

    __slots__ = ("_call", "_watch")

    def __init__(self, watch: FailureDetector, call: str) -> None:
        self._watch = watch
        self._call = call

    def __enter__(self) -> None:
        self._watch.enter(self._call)

    def __exit__(self, kind: Any, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._watch.leave(exc)
