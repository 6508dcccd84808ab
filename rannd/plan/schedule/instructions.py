"""Compile the actions of one slot into instructions that overlap receives with computation.

A Program fixes the order of transfers between each pair of slots, and the dependencies of actions. Here each compute
action gets the list of messages that it waits for, and receives are posted before they are needed (`Posting`): never
before an earlier transfer with the same slot in the same process group, so that the order within each pair stays that
of the Program.

Send buffers are released when a message arrives that the receiver sent after having used the data.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from rannd.plan.schedule.program import AHEAD, NOWHERE, OF_GRADIENTS, SENDS, TRANSFERS, Action, ActionKind

_RECEIVES = TRANSFERS - SENDS
_PARTNER = {
    ActionKind.SEND_VALUES: ActionKind.RECV_VALUES,
    ActionKind.RECV_VALUES: ActionKind.SEND_VALUES,
    ActionKind.SEND_GRADS: ActionKind.RECV_GRADS,
    ActionKind.RECV_GRADS: ActionKind.SEND_GRADS,
}


class Posting(enum.Enum):
    """When receives are posted."""

    AHEAD = "ahead"
    """`AHEAD` computations before they are needed: for transports on which a posted receive holds up nothing."""
    MATCHED = "matched"
    """Where the send happens in a step of equal computations: each transfer has one place in one order of all
    transfers and computations of all slots, so that no slot ever waits for what comes later in that order."""


Moment = tuple[int, float]
"""Time, and among events of the same time the order: sends as they are played, then computations."""


@dataclass(frozen=True)
class Instruction:
    """One action of a slot with its receives; action None: only post receives, or wait at the end."""

    action: Action | None
    posts: tuple[Action, ...] = ()
    """Receives to post before it."""
    awaits: tuple[Action, ...] = ()
    """Receives to wait for before it."""
    settles: tuple[Action, ...] = ()
    """Sends that are complete after `awaits`, because their receiver answered later."""


def instructions(
    slots: Sequence[Sequence[Action]],
    slot: int,
    posting: Posting = Posting.AHEAD,
    played: Sequence[Sequence[Moment]] | None = None,
) -> tuple[Instruction, ...]:
    """Instructions of `slot` for one phase, given the actions of all `slots`.

    `played`: what `play` returns for these slots, where that is known.
    """
    listed = list(slots[slot])
    if posting is Posting.AHEAD:
        posts = _posted_ahead(listed)
    else:
        posts = _posted_matched(listed, (play(slots) if played is None else played)[slot])
    awaits, answers = _awaits(listed), _answers(slots, slot)
    found = []
    for place, action in enumerate(listed):
        if action.kind in _RECEIVES:
            if place in posts:
                found.append(Instruction(None, tuple(posts[place])))
            continue
        settles = [sent for each in awaits.get(place, ()) for sent in answers.get(each, ())]
        found.append(Instruction(action, tuple(posts.get(place, ())), tuple(awaits.get(place, ())), tuple(settles)))
    found.append(Instruction(None, awaits=tuple(awaits.get(len(listed), ()))))
    return tuple(found)


def _answers(slots: Sequence[Sequence[Action]], slot: int) -> dict[Action, list[Action]]:
    """Map each receive of `slot` to the sends that it shows to be complete; each send is listed once."""
    found: dict[Action, list[Action]] = {}
    for peer in {action.peer for action in slots[slot] if action.kind in _RECEIVES}:
        theirs = list(slots[peer])
        used = [
            (place, _other_side(receive, peer))
            for place, receives in sorted(_awaits(theirs).items())
            for receive in receives
            if receive.peer == slot
        ]
        done = 0
        for place, action in enumerate(theirs):
            if action.kind not in SENDS or action.peer != slot:
                continue
            before = done
            while done < len(used) and used[done][0] < place:
                done += 1
            found[_other_side(action, peer)] = [sent for _, sent in used[before:done]]
    return found


def _other_side(action: Action, slot: int) -> Action:
    """The peer's action for a transfer of `slot`."""
    return Action(_PARTNER[action.kind], action.piece, action.src, action.dst, slot)


def _posted_ahead(listed: list[Action]) -> dict[int, list[Action]]:
    """Receives to post before each position in the list, `AHEAD` computations early.

    Slots with several stages send both ways, in orders that differ on the two sides: then each direction has its own.
    """
    posts: dict[int, list[Action]] = {}
    computes: list[int] = []
    apart = any(action.kind not in TRANSFERS and action.stage != NOWHERE for action in listed)
    earliest: dict[tuple[int, bool], int] = {}
    """Earliest position at which the next receive from each slot in each process group may be posted."""
    for place, action in enumerate(listed):
        pair = (action.peer, action.kind in OF_GRADIENTS)
        if action.kind not in TRANSFERS:
            computes.append(place)
        elif action.kind in SENDS:
            earliest[pair] = earliest.get(pair, 0) if apart else place + 1
        else:
            wanted = computes[-AHEAD] if len(computes) >= AHEAD else 0
            earliest[pair] = max(earliest.get(pair, 0), wanted)
            posts.setdefault(earliest[pair], []).append(action)
    return posts


_UNITS = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: 2, ActionKind.WEIGHT: 1}
"""Time of a computation in the step that orders transfers. Any positive times give an order without deadlocks."""


def _posted_matched(listed: list[Action], moments: Sequence[Moment]) -> dict[int, list[Action]]:
    """Receives to post before each position in the list, where their sends happen; see `Posting.MATCHED`."""
    end = max((place + 1 for place, action in enumerate(listed) if action.kind not in TRANSFERS), default=0)
    issued = [place for place, action in enumerate(listed[:end]) if action.kind not in _RECEIVES]
    times = [moments[place] for place in issued]
    receives = [place for place, action in enumerate(listed[:end]) if action.kind in _RECEIVES]
    posts: dict[int, list[Action]] = {}
    for place in sorted(receives, key=moments.__getitem__):
        posts.setdefault(issued[bisect_right(times, moments[place])], []).append(listed[place])
    for place, action in enumerate(listed[end:], end):  # no computation of either side comes after these
        if action.kind in _RECEIVES:
            posts[place] = [action]
    return posts


def play(slots: Sequence[Sequence[Action]]) -> list[list[Moment]]:
    """Play a phase with computations of `_UNITS` and transfers without duration.

    Returns the moment of each action of each slot; that of a receive is the moment of its send.
    """
    moments: list[list[Moment]] = [[] for _ in slots]
    clocks, count = [0] * len(slots), 0
    wires: dict[tuple[int, int, bool], deque[Moment]] = defaultdict(deque)
    ready = list(range(len(slots)))
    waiting: dict[tuple[int, int, bool], int] = {}
    while ready:
        here = ready.pop()
        while len(moments[here]) < len(slots[here]):
            action = slots[here][len(moments[here])]
            gradients = action.kind in OF_GRADIENTS
            moment: Moment = clocks[here], math.inf
            if action.kind in SENDS:
                moment = clocks[here], count
                count += 1
                wire = here, action.peer, gradients
                wires[wire].append(moment)
                if wire in waiting:
                    ready.append(waiting.pop(wire))
            elif action.kind in _RECEIVES:
                wire = action.peer, here, gradients
                if not wires[wire]:
                    waiting[wire] = here
                    break
                moment = wires[wire].popleft()
                clocks[here] = max(clocks[here], moment[0])
            else:
                clocks[here] += _UNITS[action.kind]
            moments[here].append(moment)
    return moments


def _awaits(listed: list[Action]) -> dict[int, list[Action]]:
    """Receives to wait for before each position in the list.

    Outputs and gradients of inputs, which are not used by the slot's own computations, are awaited at the end.
    """
    consumers = {(action.kind, action.piece, action.stage): place for place, action in enumerate(listed)}
    awaits: dict[int, list[Action]] = {}
    for place, action in enumerate(listed):
        if action.kind in _RECEIVES:
            gradients = action.kind is ActionKind.RECV_GRADS
            kind, stage = (ActionKind.BACKWARD, action.src) if gradients else (ActionKind.FORWARD, action.dst)
            # Where a slot has one stage, its computations do not name it.
            needed = consumers.get((kind, action.piece, stage), consumers.get((kind, action.piece, NOWHERE), -1))
            awaits.setdefault(needed if needed > place else len(listed), []).append(action)
    return awaits
