"""Model checker for instructions on devices with streams: no step may end in a deadlock under NCCL's rules.

Unlike gloo, NCCL runs a transfer as a kernel on both devices. It completes only when both have reached it, and holds up
all that comes later on its stream. A host that waits for its device (``cudaMalloc``, the loading of a kernel, an
allocation that is retried) therefore waits for the peers of all transfers it has issued, and a communicator that does
not exist yet is made by both hosts together.

Streams are first in, first out, and hosts issue a fixed list of operations, so that each event has a fixed set of
events that it waits for. A deadlock is a circle of them, and more waiting never removes one: it is enough to check the
step in which every host waits for its device before every computation.

Source: NCCL user guide, "Point-to-point communication" and "Using multiple NCCL communicators concurrently";
ProcessGroupNCCL of torch (one stream per communicator, made at the first operation unless ``device_id`` is given).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rannd.errors import PlanError
from rannd.plan.schedule.instructions import Instruction, Posting, instructions, play
from rannd.plan.schedule.program import NOWHERE, OF_GRADIENTS, SENDS, TRANSFERS, Action, ActionKind, Program

_ACCUMULATE = frozenset({ActionKind.BACKWARD, ActionKind.WEIGHT})
_MEET = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD})
_Transfer = tuple[bool, int, int, int, int, int]
"""A transfer as both sides name it: whether it is a gradient, edge, microbatch, sender, receiver."""


class Streams(enum.Enum):
    """What shares a communicator, and so a stream on each device."""

    CHANNEL = "channel"
    """Transfers of one kind (values or gradients) from one slot to another."""
    PAIR = "pair"
    """Transfers of one kind between two slots: what torch makes for unbatched send and receive."""
    SLOT = "slot"
    """All transfers of one kind of a slot: what torch does in groups that are made with a `device_id`."""


@dataclass(frozen=True)
class StreamRules:
    """How transfers wait for each other."""

    streams: Streams = Streams.CHANNEL
    opened: bool = True
    """Communicators exist before the step; else the first operation of each makes its host wait for the peer's."""
    synchronises: bool = True
    """Hosts may wait for their device before each computation, and in the middle of a backward."""
    overlap: bool = True
    """Reductions of gradients begin in the middle of the last backward of a stage, or of its last second half, not at
    the end of the step."""
    meets: bool = False
    """The replicas of a stage wait for each other before and after each forward and backward (ZeRO 2 and 3)."""


def check_streams(program: Program, posting: Posting, rules: StreamRules) -> None:
    """Check that a step of `program`, with its receives posted as `posting` says, ends under `rules`.

    Raises:
        PlanError: Slots wait for each other in a circle, which the message names; or replicas that meet do not do
            the same.
    """
    _Events(program, posting, rules).check()


@dataclass
class _Slot:
    """What was issued so far on one slot."""

    host: int
    """The host's last event."""
    compute: int
    """Last event of the stream of computations."""
    queues: dict[object, int] = field(default_factory=dict)
    """Last transfer of each communicator."""
    pending: set[int] = field(default_factory=set)
    """Events on this device since the host last waited for it."""
    firsts: dict[object, int] = field(default_factory=dict)
    """The host's first operation of each communicator."""
    met: list[tuple[ActionKind, int]] = field(default_factory=list)
    """What it met its replicas for: computations, and their stages."""


class _Events:
    """The events of a step, each with the events that come before it."""

    def __init__(self, program: Program, posting: Posting, rules: StreamRules) -> None:
        self._program, self._rules = program, rules
        self._before: list[list[int]] = []
        self._names: list[str] = []
        self._transfers: dict[_Transfer, int] = {}
        self._collectives: dict[tuple[int, int], int] = {}
        self._meetings: dict[tuple[int, int], int] = {}
        self._slots = [
            _Slot(self._event(f"slot {slot}"), self._event(f"slot {slot}")) for slot in range(program.layout.world)
        ]
        self._openings: list[tuple[int, int, object]] = []
        """(event, peer, communicator): events that wait for the peer's first operation of a communicator."""
        phases = [(slots, play(slots)) for slots in program.phases]
        for slot in range(program.layout.world):
            listed = [each for slots, played in phases for each in instructions(slots, slot, posting, played)]
            reductions = [action for action in program.slots[slot] if action.kind is ActionKind.REDUCE]
            for operation, action in self._operations(slot, listed, reductions):
                self._issue(slot, operation, action)
        for slots in program.layout.stages:
            if any(self._slots[slot].met != self._slots[slots[0]].met for slot in slots):
                raise PlanError(f"the replicas in slots {slots} do not run forwards and backwards in the same order")
        for event, peer, queue in self._openings:
            if queue in self._slots[peer].firsts:
                self._before[event].append(self._slots[peer].firsts[queue])

    def _event(self, name: str, *before: int) -> int:
        self._names.append(name)
        self._before.append(list(before))
        return len(self._names) - 1

    def _operations(
        self, slot: int, listed: Sequence[Instruction], reductions: Sequence[Action]
    ) -> Iterator[tuple[str, Action]]:
        """What a host does in a step, in order: 'post', 'await', 'compute', 'send', 'reduce'."""
        left = list(reductions)
        begin = self._beginnings(slot, listed, reductions) if self._rules.overlap else {}
        for each in listed:
            yield from (("post", action) for action in each.posts)
            yield from (("await", action) for action in (*each.awaits, *each.settles))
            if each.action is None:
                continue
            if each.action.kind in TRANSFERS:
                yield "send", each.action
                continue
            yield "compute", each.action
            if each.action in begin:
                yield from (("reduce", action) for action in begin[each.action])
                yield "compute", each.action
                left = [action for action in left if action not in begin[each.action]]
        yield from (("reduce", action) for action in left)
        yield from (("compute", action) for action in reductions[:1])  # the next step

    def _beginnings(
        self, slot: int, listed: Sequence[Instruction], reductions: Sequence[Action]
    ) -> dict[Action, list[Action]]:
        """The reductions that begin in each computation: the last that adds to gradients of one of their stages."""
        layout = self._program.layout
        last: dict[int, int] = {}
        computed = [each.action for each in listed if each.action is not None and each.action.kind in _ACCUMULATE]
        for place, action in enumerate(computed):
            last[layout.stage_at(slot, action)] = place
        found: dict[Action, list[Action]] = {}
        for reduction in reductions:
            alone = reduction.piece == NOWHERE
            stages = {layout.stage_at(slot, reduction)} if alone else set(layout.tied[reduction.piece])
            places = [place for stage, place in last.items() if stage in stages]
            if places:
                found.setdefault(computed[max(places)], []).append(reduction)
        return found

    def _issue(self, slot: int, operation: str, action: Action) -> None:
        """Add the events of one operation of a host."""
        here = self._slots[slot]
        name = f"slot {slot} at {action}"
        host = here.host = self._event(name, here.host)
        if operation == "compute":
            if self._rules.synchronises:
                self._before[host] += here.pending
                here.pending.clear()
            meets = self._rules.meets and action.kind in _MEET
            if meets:
                self._meet(slot, action)
            here.compute = self._event(name, host, here.compute)
            here.pending.add(here.compute)
            if meets:
                self._meet(slot, action)
        elif operation == "await":
            here.compute = self._event(name, host, here.compute, self._transfer(slot, action))
            here.pending.add(here.compute)
        elif operation == "reduce":
            collective = self._collective(slot, action)
            self._before[collective] += (host, here.compute)
            here.pending.add(collective)
        else:
            self._move(slot, action)

    def _meet(self, slot: int, action: Action) -> None:
        """Let the computations of a slot wait for those of its replicas that are as far."""
        here, layout = self._slots[slot], self._program.layout
        stage = layout.stage_at(slot, action)
        if len(layout.stages[stage]) == 1:
            return
        number, first = len(here.met), layout.stages_of(slot)[0]  # replicas have the same stages
        here.met.append((action.kind, stage))
        if (first, number) not in self._meetings:
            self._meetings[first, number] = self._event(f"meeting {number} of the replicas of stage {stage}")
        meeting = self._meetings[first, number]
        self._before[meeting] += (here.host, here.compute)
        here.compute = self._event(f"slot {slot} at {action}", here.host, here.compute, meeting)
        here.pending.add(here.compute)

    def _move(self, slot: int, action: Action) -> None:
        """Issue a send or receive."""
        here = self._slots[slot]
        transfer, queue = self._transfer(slot, action), self._queue(slot, action)
        self._before[transfer] += (here.host, here.compute)
        if queue in here.queues:
            self._before[transfer].append(here.queues[queue])
        here.queues[queue] = transfer
        here.pending.add(transfer)
        pair = (
            queue
            if self._rules.streams is Streams.CHANNEL
            else (action.kind in OF_GRADIENTS, *sorted((slot, action.peer)))
        )
        if not self._rules.opened and pair not in here.firsts:
            here.firsts[pair] = here.host
            here.host = self._event(f"slot {slot} at {action}", here.host)
            self._openings.append((here.host, action.peer, pair))

    def _transfer(self, slot: int, action: Action) -> int:
        sender, receiver = (slot, action.peer) if action.kind in SENDS else (action.peer, slot)
        key = (action.kind in OF_GRADIENTS, action.src, action.dst, action.piece, sender, receiver)
        if key not in self._transfers:
            kind = "gradients" if key[0] else "values"
            self._transfers[key] = self._event(
                f"{kind} of microbatch {action.piece} from slot {sender} to slot {receiver}"
            )
        return self._transfers[key]

    def _collective(self, slot: int, action: Action) -> int:
        """The event of a reduction: over a stage of the slot, or over tied stages."""
        key = (self._program.layout.stage_at(slot, action) if action.piece == NOWHERE else NOWHERE, action.piece)
        if key not in self._collectives:
            self._collectives[key] = self._event(f"the reduction {action}")
        return self._collectives[key]

    def _queue(self, slot: int, action: Action) -> object:
        """The communicator, as this slot sees it, that an action uses."""
        if self._rules.streams is Streams.SLOT:
            return action.kind in OF_GRADIENTS
        if self._rules.streams is Streams.PAIR:
            return self._pair(slot, action)
        return (action.kind in OF_GRADIENTS, *((slot, action.peer) if action.kind in SENDS else (action.peer, slot)))

    def _pair(self, slot: int, action: Action) -> tuple[bool, int, int]:
        return action.kind in OF_GRADIENTS, min(slot, action.peer), max(slot, action.peer)

    def check(self) -> None:
        """Raise PlanError if not every event can happen."""
        after: list[list[int]] = [[] for _ in self._before]
        waits = [len(before) for before in self._before]
        for event, before in enumerate(self._before):
            for each in before:
                after[each].append(event)
        ready = [event for event, number in enumerate(waits) if not number]
        while ready:
            for event in after[ready.pop()]:
                waits[event] -= 1
                if not waits[event]:
                    ready.append(event)
        if any(waits):
            raise PlanError(f"the step would never end on devices with streams: {self._circle(waits)}")

    def _circle(self, waits: Sequence[int]) -> str:
        """Describe events that wait for each other, given the number of events that each still waits for."""
        event = next(event for event, number in enumerate(waits) if number)
        seen: list[int] = []
        while event not in seen:
            seen.append(event)
            event = next(each for each in self._before[event] if waits[each])
        names = [self._names[each] for each in seen[seen.index(event) :]]
        kept = [name for place, name in enumerate(names) if name != names[place - 1]] or names[:1]
        return " waits for ".join([*kept, kept[0]])
