"""Compile the actions of one slot into instructions that overlap receives with computation.

A Program fixes the order of transfers between each pair of slots, and the dependencies of actions. Here each compute
action gets the list of messages that it waits for, and receives are posted up to `AHEAD` computations before they are
needed, but never before an earlier transfer with the same slot in the same process group, so that the order within
each pair stays that of the Program.

Send buffers are released when a message arrives that the receiver sent after having used the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rannd.plan.schedule.program import AHEAD, SENDS, TRANSFERS, Action, ActionKind

_GRADS = frozenset({ActionKind.SEND_GRADS, ActionKind.RECV_GRADS})
_RECEIVES = TRANSFERS - SENDS
_PARTNER = {
    ActionKind.SEND_VALUES: ActionKind.RECV_VALUES,
    ActionKind.RECV_VALUES: ActionKind.SEND_VALUES,
    ActionKind.SEND_GRADS: ActionKind.RECV_GRADS,
    ActionKind.RECV_GRADS: ActionKind.SEND_GRADS,
}


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


def instructions(slots: Sequence[Iterable[Action]], slot: int) -> tuple[Instruction, ...]:
    """Instructions of `slot` for one phase, given the actions of all `slots`."""
    listed = list(slots[slot])
    posts, awaits, answers = _posts(listed), _awaits(listed), _answers(slots, slot)
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


def _answers(slots: Sequence[Iterable[Action]], slot: int) -> dict[Action, list[Action]]:
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


def _posts(listed: list[Action]) -> dict[int, list[Action]]:
    """Receives to post before each position in the list."""
    posts: dict[int, list[Action]] = {}
    computes: list[int] = []
    earliest: dict[tuple[int, bool], int] = {}
    """Earliest position at which the next receive from each slot in each process group may be posted."""
    for place, action in enumerate(listed):
        pair = (action.peer, action.kind in _GRADS)
        if action.kind not in TRANSFERS:
            computes.append(place)
        elif action.kind in SENDS:
            earliest[pair] = place + 1
        else:
            wanted = computes[-AHEAD] if len(computes) >= AHEAD else 0
            earliest[pair] = max(earliest.get(pair, 0), wanted)
            posts.setdefault(earliest[pair], []).append(action)
    return posts


def _awaits(listed: list[Action]) -> dict[int, list[Action]]:
    """Receives to wait for before each position in the list.

    Outputs and gradients of inputs, which are not used by the slot's own computations, are awaited at the end.
    """
    consumers = {(action.kind, action.piece): place for place, action in enumerate(listed)}
    awaits: dict[int, list[Action]] = {}
    for place, action in enumerate(listed):
        if action.kind in _RECEIVES:
            kind = ActionKind.BACKWARD if action.kind is ActionKind.RECV_GRADS else ActionKind.FORWARD
            needed = consumers.get((kind, action.piece), -1)
            awaits.setdefault(needed if needed > place else len(listed), []).append(action)
    return awaits
