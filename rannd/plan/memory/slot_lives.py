"""Replays the Program of a slot as allocations and frees: the most bytes in use at a time in a step.

It follows the runtime instruction by instruction: receives take message buffers when they are posted and give them back
after the backward; messages of several values are copies, held until the receiver has answered; gradients of parameters
begin in the first backward, are added up beside those that the script has kept, and are copied to buckets where several
slots reduce them. `stage_lives` replays what happens inside of a computation.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from rannd.plan.memory.stage_lives import Backward, Done, Level, StageLives
from rannd.plan.schedule.instructions import Instruction
from rannd.plan.schedule.program import NOWHERE, OF_GRADIENTS, TRANSFERS, Action, ActionKind, Edge
from rannd.plan.simulate.step_costs import BUCKET, FIRST_BUCKET

MOST_FREE = 8
"""Free message buffers that are kept of each size."""
UNKNOWN = 0.005
"""Part of what a step allocates, and"""
SMALL = 16 << 10
"""bytes that are added for what is not known: numbers, flags, statistics."""
ALIGNMENT = 64
"""Bytes: a value of a message begins at a multiple of this."""


class MessageBytes(msgspec.Struct, frozen=True):
    """What an edge carries for a microbatch."""

    bytes: int = 0
    copied: int = 0
    """Bytes that are copied to send it."""
    values: frozenset[int] = frozenset()

    @staticmethod
    def of(sizes: Mapping[int, float], views: frozenset[int]) -> MessageBytes:
        """Return the message of values with these bytes; `views`: those that may have to be copied to be sent alone."""
        there = [number for number, size in sizes.items() if size > 0]
        if len(there) > 1:
            total = sum(-(-int(sizes[number]) // ALIGNMENT) * ALIGNMENT for number in there)
            return MessageBytes(total, total, frozenset(sizes))
        total = int(sum(sizes.values()))
        return MessageBytes(total, total if views.intersection(there) else 0, frozenset(sizes))


class Holding(msgspec.Struct, frozen=True):
    """What a slot holds throughout a step, and gradients that it reduces with others."""

    always: float
    """Parameters, buffers, optimizer state, gradients that the script has kept, the rank's inputs and outputs."""
    reduced: Mapping[int, float]
    """Bytes in the bucket of each parameter that other slots hold, too, in the order of the model."""
    groups: Mapping[int, tuple[int, ...]]
    """The slots that hold it."""
    delivered: float
    """Bytes of the gradients as they are handed over, where these are copies of what was reduced."""
    stepping: float
    """Bytes of the optimizer's step beside all that is held always."""
    overlap: bool = True
    """Whether buckets are reduced in the last backward."""


def most_bytes(
    listed: Sequence[Sequence[Instruction]],
    stages: Mapping[int, StageLives],
    parcels: tuple[Mapping[Edge, MessageBytes], Mapping[Edge, MessageBytes]],
    holding: Holding,
    home: int,
    outside: int,
) -> int:
    """Return the most bytes in use at a time on a slot.

    Args:
        listed: Its instructions, for each phase.
        stages: Its stages, by number.
        parcels: Values and gradients of each edge.
        holding: What it holds throughout.
        home: The stage of actions that name none.
        outside: Number of the stage that stands for the ranks which get outputs.
    """
    slot = _SlotReplay(stages, parcels, holding, home, outside)
    slot.run(listed)
    slot.again()  # in the second step message buffers are there already
    slot.run(listed)
    return math.ceil(slot.level.most + UNKNOWN * (slot.level.most - holding.always)) + SMALL


class _SlotReplay:
    def __init__(
        self,
        stages: Mapping[int, StageLives],
        parcels: tuple[Mapping[Edge, MessageBytes], Mapping[Edge, MessageBytes]],
        holding: Holding,
        home: int,
        outside: int,
    ) -> None:
        self._stages, self._parcels, self._holding = stages, parcels, holding
        self._home, self._outside = home, outside
        self._free: Counter[int] = Counter()
        self._backwards: dict[tuple[int, frozenset[int]], Backward] = {}
        self._forwards = {number: stage.forward() for number, stage in stages.items()}
        self._kept = {number: stage.kept() for number, stage in stages.items()}
        self._buckets = self._made_buckets()
        self.again()

    def again(self) -> None:
        """Begin a step."""
        self.level = Level()
        self.level.change(self._holding.always + sum(size * count for size, count in self._free.items()))
        self._borrowed: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._sent: dict[Action, float] = {}
        self._outgoing: dict[tuple[int, int], float] = {}
        self._summed: dict[int, set[int]] = defaultdict(set)
        self._sums: dict[int, float] = {}
        self._waiting: dict[tuple[int, int], Backward] = {}
        self._present: set[int] = set()
        self._arrivals = Counter(index for stage in self._stages.values() for index in stage.params)
        self._started = 0
        self._flats = 0.0

    def run(self, listed: Sequence[Sequence[Instruction]]) -> None:
        """Replay a step."""
        last = self._last_of([each.action for phase in listed for each in phase if each.action is not None])
        for phase in listed:
            for each in phase:
                for action in each.posts:
                    self._take(self._parcel(action).bytes)
                for action in each.awaits:
                    self._receive(action)
                for action in each.settles:
                    self.level.change(-self._sent.pop(action, 0.0))
                if each.action is not None and each.action.kind in TRANSFERS:
                    self._send(each.action)
                elif each.action is not None:
                    self._compute(each.action, last)
            self.level.change(-sum(self._sent.values()))
            self._sent.clear()
        while self._started < len(self._buckets):
            self._start()
        level = self.level
        level.beside(self._holding.delivered)
        level.most = max(level.most, self._holding.always + self._holding.stepping)

    # -- messages ---------------------------------------------------------------------------------------------

    def _parcel(self, action: Action) -> MessageBytes:
        return self._parcels[action.kind in OF_GRADIENTS].get((action.src, action.dst), MessageBytes())

    def _take(self, size: int) -> None:
        if self._free[size]:
            self._free[size] -= 1
        else:
            self.level.change(size)

    def _give(self, piece: int, stage: int) -> None:
        for size in self._borrowed.pop((piece, stage), ()):
            if self._free[size] < MOST_FREE:
                self._free[size] += 1
            else:
                self.level.change(-size)

    def _receive(self, action: Action) -> None:
        parcel, gradient = self._parcel(action), action.kind in OF_GRADIENTS
        if gradient:  # those of a value that several stages read are added up
            known = self._summed[action.piece]
            more = sum(self._size_of(value) for value in parcel.values & known)
            known |= parcel.values
            self.level.change(more)
            self._sums[action.piece] = self._sums.get(action.piece, 0.0) + more
        if action.src >= 0 if gradient else action.dst < self._outside:
            stage = action.src if gradient else action.dst
            self._borrowed[action.piece, stage if stage in self._stages else self._home].append(parcel.bytes)

    def _size_of(self, value: int) -> float:
        of, _, _ = next(iter(self._stages.values())).parts
        return of.size[value]

    def _send(self, action: Action) -> None:
        parcel = self._parcel(action)
        size = float(parcel.copied)
        self.level.change(size)
        if action.kind in OF_GRADIENTS and action.dst < self._outside:
            left = self._outgoing.get((action.piece, action.dst), 0.0)
            gone = min(left, float(parcel.bytes))
            self._outgoing[action.piece, action.dst] = left - gone
            if parcel.copied:
                self.level.change(-gone)
            else:
                size += gone
        self._sent[action] = size

    # -- computations -----------------------------------------------------------------------------------------

    def _last_of(self, actions: Sequence[Action]) -> dict[int, Action]:
        found: dict[int, Action] = {}
        for kind in (ActionKind.BACKWARD, ActionKind.WEIGHT):
            found.update((self._stage_at(each), each) for each in actions if each.kind is kind)
        return found

    def _stage_at(self, action: Action) -> int:
        return action.stage if action.stage != NOWHERE else self._home

    def _compute(self, action: Action, last: Mapping[int, Action]) -> None:
        number, level = self._stage_at(action), self.level
        stage, piece = self._stages[number], action.piece
        done = self._done if action is last.get(number) else None
        before = level.now
        if action.kind is ActionKind.FORWARD:
            level.beside(self._forwards[number])
            level.change(self._kept[number])
            return
        halves = last[number].kind is ActionKind.WEIGHT
        if action.kind is ActionKind.BACKWARD:
            found = self._backward(number, stage, done)
            level.most = max(level.most, before + found.level.most)
            grown = self._grown(stage, found.present)
            level.now = before - self._kept[number] + grown + found.waiting + found.outgoing
            self._outgoing[piece, number] = found.outgoing
            level.change(-self._sums.pop(piece, 0.0) if self._single(number) else 0.0)
            self._summed.pop(piece, None)
            if halves:
                self._waiting[piece, number] = found
            self._consumed(piece, number)
        else:
            found = self._waiting.pop((piece, number))
            half = found.second_half(self._present, done)
            level.most = max(level.most, before + half.most)
            level.now = before - found.waiting + self._grown(stage, found.present)
        if halves == (action.kind is ActionKind.WEIGHT):
            self._give(piece, number)

    def _single(self, number: int) -> bool:
        return len(self._stages) == 1 or number == min(self._stages)

    def _consumed(self, piece: int, number: int) -> None:
        """Gradients that later stages of this slot left for this one are gone."""
        for later in self._stages:
            if later > number and (piece, later) in self._outgoing:
                self.level.change(-self._outgoing.pop((piece, later)))

    def _grown(self, stage: StageLives, present: set[int]) -> float:
        """Bytes of the gradients of parameters that began, less those that went to buckets."""
        new = present - self._present
        self._present |= new
        found = sum(stage.summed[index] for index in new) + self._flats
        self._flats = 0.0
        return found

    def _backward(self, number: int, stage: StageLives, done: Done | None) -> Backward:
        if done is not None:
            return stage.backward(self._present, done)
        key = number, frozenset(self._present & stage.params)
        if stage.split:  # what waits for the second half is its own
            return stage.backward(self._present)
        if key not in self._backwards:
            self._backwards[key] = stage.backward(self._present)
        return self._backwards[key]

    # -- buckets ----------------------------------------------------------------------------------------------

    def _made_buckets(self) -> list[list[int]]:
        kinds: dict[tuple[int, ...], list[int]] = {}
        for index in self._holding.reduced:
            kinds.setdefault(self._holding.groups[index], []).append(index)
        found: list[list[int]] = []
        for slots in sorted(kinds):
            most, size = FIRST_BUCKET, 0.0
            current: list[int] = []
            for index in reversed(kinds[slots]):
                nbytes = self._holding.reduced[index]
                if current and size + nbytes > most:
                    found.append(current)
                    current, size, most = [], 0.0, BUCKET
                current.append(index)
                size += nbytes
            if current:
                found.append(current)
        return found

    def _done(self, index: int, level: Level) -> None:
        """A gradient is complete: buckets begin that have all of theirs."""
        self._arrivals[index] -= 1
        if not self._holding.overlap:
            return
        while self._started < len(self._buckets) and not any(
            self._arrivals[each] > 0 for each in self._buckets[self._started]
        ):
            self._flats += self._start(level)

    def _start(self, level: Level | None = None) -> float:
        """Copy the gradients of the next bucket; returns by how much that changes what is in use."""
        bucket = self._buckets[self._started]
        self._started += 1
        level = level or self.level
        flat = sum(self._holding.reduced[each] for each in bucket)
        stage = next(iter(self._stages.values()))
        there = sum(stage.summed[each] for each in bucket)
        level.change(flat)
        level.change(-there)
        return flat - there
