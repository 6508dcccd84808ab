"""What one slot does in a step, with its receives begun early enough to arrive while it computes.

A Program says in which order the transfers of a pair of slots happen, and what has to be there before an action. This
file turns the actions of a slot into instructions: each compute action names the messages that it waits for, and
receives are posted up to `AHEAD` computations before they are needed, but never before an earlier transfer with the
same slot in the same group: the order of each pair stays the Program's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rannd.plan.schedule import SENDS, TRANSFERS, Action, Kind

AHEAD = 2
"""A receive is posted before so many computations."""

_GRADS = frozenset({Kind.SEND_GRADS, Kind.RECV_GRADS})
_RECEIVES = TRANSFERS - SENDS


@dataclass(frozen=True)
class Instruction:
    """One action of a slot; an action None only posts, or waits, at the end."""

    action: Action | None
    posts: tuple[Action, ...] = ()
    """Receives to begin before it."""
    awaits: tuple[Action, ...] = ()
    """Receives whose messages it needs."""
    settles: tuple[Action, ...] = ()
    """Sends that have arrived once these messages have: their receiver has answered."""


def instructions(actions: Iterable[Action]) -> tuple[Instruction, ...]:
    """Instructions for `actions`, which one slot does in one phase."""
    listed = list(actions)
    posts, awaits = _posts(listed), _awaits(listed)
    found = []
    sent: dict[tuple[int, int, int, int], Action] = {}
    """Sends of values by (peer, piece, src, dst), which the gradient that comes back over the edge answers."""
    for place, action in enumerate(listed):
        if action.kind in _RECEIVES:
            if place in posts:
                found.append(Instruction(None, tuple(posts[place])))
            continue
        settles = []
        for each in awaits.get(place, ()):
            answered = sent.pop(_way(each), None) if each.kind is Kind.RECV_GRADS else None
            if answered is not None:
                settles.append(answered)
        if action.kind is Kind.SEND_VALUES:
            sent[_way(action)] = action
        found.append(Instruction(action, tuple(posts.get(place, ())), tuple(awaits.get(place, ())), tuple(settles)))
    found.append(Instruction(None, awaits=tuple(awaits.get(len(listed), ()))))
    return tuple(found)


def _way(action: Action) -> tuple[int, int, int, int]:
    return action.peer, action.piece, action.src, action.dst


def _posts(listed: list[Action]) -> dict[int, list[Action]]:
    """The receives to post before each place."""
    posts: dict[int, list[Action]] = {}
    computes: list[int] = []
    earliest: dict[tuple[int, bool], int] = {}
    """Where the next receive from each slot in each group may be posted."""
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
    """The receives whose messages are needed at each place; the end for what is not for the slot's own computations.

    That are outputs, and gradients of inputs: they belong to the rank.
    """
    consumers = {(action.kind, action.piece): place for place, action in enumerate(listed)}
    awaits: dict[int, list[Action]] = {}
    for place, action in enumerate(listed):
        if action.kind in _RECEIVES:
            kind = Kind.BACKWARD if action.kind is Kind.RECV_GRADS else Kind.FORWARD
            needed = consumers.get((kind, action.piece), -1)
            awaits.setdefault(needed if needed > place else len(listed), []).append(action)
    return awaits
