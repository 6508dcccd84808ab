"""Transfers over gloo that wait for each other as NCCL's do: what would hang on GPUs hangs here, and says where.

A *lane* stands for a communicator with its stream: a thread carries out the transfers that share it, one after the
other. A send completes only when its receive has been posted and has come to the head of the peer's lane; both must
name the same number of bytes. What is received stays out of the buffer, which is overwritten when it is posted, until
it is taken. Before each computation the host waits for all transfers that it has issued, as if it allocated memory.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rannd.errors import StepError
from rannd.plan.schedule.instructions import Posting
from rannd.plan.schedule.stream_checker import StreamRules, Streams
from rannd.runtime.transport.transport import Transport, finish

LIMIT_S = 120.0
"""Seconds after which a transfer that is waited for counts as hanging."""
POISON = 0xFF
"""Byte that a buffer is filled with until its message is taken: NaN in all floating point types."""

_SIZE, _READY, _DATA = 1, 2, 3
"""Tags of gloo's messages."""


@dataclass(eq=False)
class _Operation:
    """A transfer, or the meeting of two hosts, in a lane."""

    text: str
    run: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    received: torch.Tensor | None = None
    buffer: torch.Tensor | None = None


class _Lane:
    """Carries out operations one after the other."""

    def __init__(self, name: str) -> None:
        self.waiting: deque[_Operation] = deque()
        """Operations that are not done, in order."""
        self._given: queue.SimpleQueue[_Operation] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def give(self, operation: _Operation) -> None:
        self.waiting.append(operation)
        self._given.put(operation)

    def _work(self) -> None:
        while True:
            operation = self._given.get()
            try:
                operation.run()
            except BaseException as exc:
                operation.error = exc
            self.waiting.popleft()
            operation.done.set()


class StrictTransport(Transport):
    """NCCL's rules on CPUs.

    Args:
        device: The CPU.
        rank: This rank.
        values: gloo group of all ranks for values; None for a single rank.
        gradients: gloo group of all ranks for gradients.
        rules: How transfers wait for each other; `overlap` has no meaning here.
        posting: When the steps that are run post receives; tests show what hangs with another one.
        limit_s: Seconds after which a transfer that is waited for is an error that shows the lanes.
    """

    name = "strict"
    reads_late = True
    backend = "gloo"
    posting = Posting.MATCHED
    rules = StreamRules(Streams.PAIR)

    def __init__(
        self,
        device: torch.device,
        rank: int,
        values: dist.ProcessGroup | None,
        gradients: dist.ProcessGroup | None,
        *,
        rules: StreamRules = rules,
        posting: Posting = posting,
        limit_s: float = LIMIT_S,
    ) -> None:
        super().__init__(device)
        self._rank = rank
        self._groups = values, gradients
        self._rules = rules
        self.posting = posting
        self._limit_s = limit_s
        self._lanes: dict[object, _Lane] = {}
        self._met: set[object] = set()

    def send(self, message: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Queue a send."""
        group = self._groups[gradients]
        size = torch.tensor([message.numel()])

        def run() -> None:
            ready = torch.empty(1, dtype=torch.int64)
            finish(dist.irecv(ready, peer, group=group, tag=_READY))
            finish(dist.isend(size, peer, group=group, tag=_SIZE))
            if int(ready) != message.numel():
                raise StepError(f"rank {self._rank} sends {message.numel()} bytes, rank {peer} expects {int(ready)}")
            finish(dist.isend(message, peer, group=group, tag=_DATA))

        text = f"send {message.numel()} bytes to rank {peer}"
        return self._give(_Operation(text, run), peer, gradients=gradients, outwards=True)

    def post(self, buffer: torch.Tensor, peer: int, *, gradients: bool) -> object:
        """Queue a receive, and make its buffer unusable."""
        group = self._groups[gradients]
        buffer.fill_(POISON)
        data = torch.empty_like(buffer)
        size = torch.tensor([buffer.numel()])

        def run() -> None:
            finish(dist.isend(size, peer, group=group, tag=_READY))
            comes = torch.empty(1, dtype=torch.int64)
            finish(dist.irecv(comes, peer, group=group, tag=_SIZE))
            if int(comes) != buffer.numel():
                raise StepError(f"rank {peer} sends {int(comes)} bytes, rank {self._rank} expects {buffer.numel()}")
            finish(dist.irecv(data, peer, group=group, tag=_DATA))

        operation = _Operation(f"receive {buffer.numel()} bytes from rank {peer}", run, received=data, buffer=buffer)
        return self._give(operation, peer, gradients=gradients, outwards=False)

    def take(self, posted: object) -> None:
        """Wait for a message, and put it into its buffer."""
        assert isinstance(posted, _Operation)
        self._wait_for(posted)
        assert posted.buffer is not None
        assert posted.received is not None
        posted.buffer.copy_(posted.received)

    def settle(self, sent: object) -> None:
        """Wait until a message has been sent."""
        assert isinstance(sent, _Operation)
        self._wait_for(sent)

    def before_computation(self) -> None:
        """Wait for all transfers, as a host does whose device has to be idle."""
        if self._rules.synchronises:
            for lane in self._lanes.values():
                for operation in list(lane.waiting):
                    self._wait_for(operation)

    def _give(self, operation: _Operation, peer: int, *, gradients: bool, outwards: bool) -> _Operation:
        ends: dict[Streams, object] = {
            Streams.CHANNEL: (gradients, peer, outwards),
            Streams.PAIR: (gradients, peer),
            Streams.SLOT: gradients,
        }
        key = ends[self._rules.streams]
        if key not in self._lanes:
            self._lanes[key] = _Lane(f"strict transport of {'gradients' if gradients else 'values'}, {key}")
        lane = self._lanes[key]
        if not self._rules.opened and (gradients, peer) not in self._met:
            self._met.add((gradients, peer))
            self._meet(lane, peer, gradients=gradients)
        operation.text += " (gradients)" if gradients else " (values)"
        lane.give(operation)
        return operation

    def _meet(self, lane: _Lane, peer: int, *, gradients: bool) -> None:
        """Wait until the host of the peer wants to use the pair as well."""
        group = self._groups[gradients]

        def run() -> None:
            mine, theirs = torch.zeros(1), torch.empty(1)
            works = dist.isend(mine, peer, group=group), dist.irecv(theirs, peer, group=group)
            for work in works:
                finish(work)

        operation = _Operation(f"first transfer with rank {peer}", run)
        lane.give(operation)
        self._wait_for(operation)

    def _wait_for(self, operation: _Operation) -> None:
        if not operation.done.wait(self._limit_s):
            lanes = "; ".join(
                ", then ".join(each.text for each in lane.waiting) for lane in self._lanes.values() if lane.waiting
            )
            raise StepError(
                f"rank {self._rank} has waited for {self._limit_s:g} s for '{operation.text}' under NCCL's rules. Its "
                f"transfers that are not done, by stream: {lanes}"
            )
        if operation.error is not None:
            raise operation.error
