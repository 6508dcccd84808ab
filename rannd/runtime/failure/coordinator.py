"""Hub of the side channel on rank 0: decides whether the job has failed, and notifies all ranks.

::

    rank 2 ──Told──► hub: certain?  ── yes ─► Told to all ──► each reports it ──Heard──► hub ──Heard──► rank 2
                       │                                                                 (which may exit now)
                       └ no: Forgiven if all ranks raise an error before they run anything; after GRACE_S: as yes
    connection ends without Left ──► Told(gone)      rank waits too long ──Stuck──► Ask to all ──Stacks──► Told(hang)
                                                        rank waits for long ──Waits──► Ask to all ──Stacks──► one line
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import time

import msgspec

from rannd import log
from rannd.ranks.admission import Reception
from rannd.runtime.failure import wait_notice
from rannd.runtime.failure.failure_report import Failure
from rannd.runtime.failure.side_channel import (
    AnyMessage,
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
    prepare,
)

GRACE_S = 5.0
"""Seconds that an error which all ranks may raise alike waits for the errors of the other ranks."""
ANSWER_S = 10.0
"""Seconds in which a rank must answer with its stacks; its Python may be busy."""


class Hub:
    """Hub of the side channel, run by rank 0's watcher thread; `selector` calls `accept` and `_serve`."""

    def __init__(self, size: int, token: str, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        self._size = size
        self._reception = Reception(listener, token, lambda line: log.get("RaNNCProcess").warning("rank 0: %s", line))
        self._selector = selector
        self._channels: dict[int, Channel] = {}
        self._hellos: dict[int, RankHello] = {}
        self._unnamed: set[Channel] = set()
        self._left: set[int] = set()
        self._heard: set[int] = set()
        self._failure: Failure | None = None
        self._doubts: dict[int, Failure] = {}
        self._doubts_end = 0.0
        self._question = 0
        self._asked_by: Stuck | Waits | None = None
        self._answers: dict[int, Stacks] = {}
        self._answers_end = 0.0
        selector.register(self._reception, selectors.EVENT_READ, self.accept)

    def accept(self) -> None:
        """Accept new connections of ranks."""
        for end in self._reception.admit():
            with contextlib.suppress(OSError):
                prepare(end)
            self.adopt(Channel(end))

    def adopt(self, channel: Channel) -> None:
        """Start receiving from a connection, whose rank is unknown until its RankHello."""
        self._unnamed.add(channel)
        self._selector.register(channel.socket, selectors.EVENT_READ, lambda: self._serve(channel))

    def due(self) -> float | None:
        """Seconds until `tick` has something to do."""
        ends = [self._doubts_end] if self._doubts else []
        ends += [self._answers_end] if self._asked_by is not None else []
        pauses = [max(0.0, end - time.monotonic()) for end in ends]
        pauses += [pause] if (pause := self._reception.due()) is not None else []
        return min(pauses) if pauses else None

    def tick(self) -> None:
        """Handle expired deadlines."""
        self.accept()
        now = time.monotonic()
        if self._doubts and now >= self._doubts_end:
            self._decide(min(self._doubts.values(), key=lambda each: each.rank))
        if self._asked_by is not None and now >= self._answers_end:
            self._judge()

    def detach(self) -> None:
        """Stop sending, but leave the connections open until the process ends."""
        for channel in [*self._channels.values(), *self._unnamed]:
            channel.socket.detach()

    def forget(self) -> None:
        """Close this process's copies of the parent's sockets, in a forked child."""
        self._reception.close()
        for channel in [*self._channels.values(), *self._unnamed]:
            channel.close()

    # -- messages ---------------------------------------------------------------------------------------------

    def _serve(self, channel: Channel) -> None:
        rank = next((rank for rank, each in self._channels.items() if each is channel), None)
        try:
            messages = channel.receive()
            for message in messages or []:
                if rank is None:
                    rank = self._meet(channel, message)
                else:
                    self._take(rank, message)
        except ChannelError as exc:
            log.get("RaNNCProcess").warning("invalid message on the side channel (%s)", exc)
            messages = None
        if messages is None:
            self._drop(channel)
            if rank is not None:
                del self._channels[rank]
                self._part(rank)

    def _meet(self, channel: Channel, message: AnyMessage) -> int:
        if not isinstance(message, RankHello):
            raise ChannelError(f"{type(message).__name__} before RankHello")
        if message.rank in self._channels or not 0 <= message.rank < self._size:
            raise ChannelError(f"another client is rank {message.rank}")
        self._unnamed.discard(channel)
        self._channels[message.rank] = channel
        self._hellos[message.rank] = message
        if self._failure is not None:
            channel.send(Told(self._failure))
        return message.rank

    def _take(self, rank: int, message: AnyMessage) -> None:
        if isinstance(message, Told):
            if message.failure.certain:
                self._decide(message.failure)
            else:
                self._doubt(message.failure)
        elif isinstance(message, Left):
            self._left.add(rank)
            self._tell(message)
        elif isinstance(message, Heard):
            self._heard.add(rank)
            self._all_heard()
        elif isinstance(message, Stuck | Waits):
            self._ask(msgspec.structs.replace(message, rank=rank))
        elif isinstance(message, Stacks) and message.number == self._question and self._asked_by is not None:
            self._answers[rank] = message
            if self._answers.keys() >= self._channels.keys() - self._left:
                self._judge()

    def _part(self, rank: int) -> None:
        """Handle the end of a rank's connection: a failure unless the rank has left or the job has failed."""
        if rank not in self._left and self._failure is None:
            why = "it was killed, or crashed outside Python (out of memory?), or its machine is gone"
            self._decide(Failure(rank, self._hellos[rank].host, self._hellos[rank].pid, "gone", "", why))
        self._tell(Gone(rank))
        self._all_heard()

    def _tell(self, message: AnyMessage) -> None:
        for channel in self._channels.values():
            channel.send(message)

    def _drop(self, channel: Channel) -> None:
        self._unnamed.discard(channel)
        self._selector.unregister(channel.socket)
        channel.close()

    # -- failures ---------------------------------------------------------------------------------------------

    def _decide(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure
            self._doubts.clear()
            self._asked_by = None
            self._tell(Told(failure))

    def _doubt(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        if not self._doubts:
            self._doubts_end = time.monotonic() + GRACE_S
        self._doubts[failure.rank] = failure
        if len(self._doubts) == self._size:
            self._doubts.clear()
            self._tell(Forgiven())

    def _all_heard(self) -> None:
        """Let the failed rank exit once all others have reported the failure."""
        if self._failure is not None and self._channels.keys() <= self._heard | {self._failure.rank}:
            self._tell(Heard())

    # -- hanging ----------------------------------------------------------------------------------------------

    def _ask(self, by: Stuck | Waits) -> None:
        """Ask all ranks what they do, one question at a time; a hang goes before a notice."""
        hang = isinstance(by, Stuck)
        if self._failure is None and (self._asked_by is None or (hang and isinstance(self._asked_by, Waits))):
            self._question += 1
            self._asked_by, self._answers = by, {}
            self._answers_end = time.monotonic() + ANSWER_S
            self._tell(Ask(self._question, stacks=hang))

    def _judge(self) -> None:
        """Handle the answers, or those that came in time."""
        asked_by, answers = self._asked_by, self._answers
        self._asked_by = None
        if isinstance(asked_by, Waits):
            silent = self._channels.keys() - answers.keys() - self._left
            line = wait_notice.notice(asked_by.rank, answers, silent, self._left)
            if line:
                logger = log.get("RaNNCProcess")
                (logger.info if wait_notice.is_expected(asked_by.rank, answers) else logger.warning)("%s", line)
        elif asked_by is not None:
            self._judge_hang(asked_by, answers)

    def _judge_hang(self, stuck: Stuck, answers: dict[int, Stacks]) -> None:
        """Decide on a hang from the ranks' stacks, and print them.

        No hang if a rank is still preparing, or was until now: what it waits for may be on its way.
        """
        gets_on = [each for each in answers.values() if each.doing == "waiting" and each.still < wait_notice.STILL_S]
        if gets_on or any(each.doing == "preparing" for each in answers.values()):
            return
        silent = sorted(self._channels.keys() - answers.keys() - self._left)
        words = [f"rank {rank} {_doing(answers[rank])}" for rank in sorted(answers)]
        words += [f"rank {rank} does not answer: it is stopped, or native code holds the GIL" for rank in silent]
        words += [f"rank {rank} has ended its script" for rank in sorted(self._left)]
        others = [rank for rank in sorted(answers) if answers[rank].doing != "waiting"]
        culprit = (silent or others or [stuck.rank])[0]
        parts = [f"rannd: no progress for {stuck.seconds:.0f} s; the stacks of all ranks, innermost call last:"]
        for rank in sorted(answers):
            parts.append(f"--- rank {rank} {_doing(answers[rank])}\n{answers[rank].stacks.rstrip()}")
        parts += [f"--- rank {rank} does not answer" for rank in silent]
        print("\n".join(parts), file=sys.stderr, flush=True)
        found = answers.get(culprit)
        self._decide(
            Failure(
                rank=culprit,
                host=self._hellos[culprit].host,
                pid=self._hellos[culprit].pid,
                kind="hang",
                place=found.place if found is not None else "",
                error=f"no progress for {stuck.seconds:.0f} s (watchdog_timeout_s): {'; '.join(words)}",
            )
        )


def _doing(answer: Stacks) -> str:
    if answer.doing == "waiting":
        return f"waits for others in {answer.place}"
    if answer.doing == "script":
        return f"is in {answer.place}, at {answer.line}"
    return f"works in {answer.place}, at {answer.line}"
