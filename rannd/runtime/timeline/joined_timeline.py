"""One timeline of the events of all ranks.

Ranks of a node have the same clock. Those of two nodes are compared by the ends of agreements, which all ranks leave
when the last one has come: the middle of many differences is theirs, up to the time of a message.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rannd.plan.schedule.program import Action
from rannd.plan.simulate.timeline import COMPUTE, RECEIVE, REDUCE, SEND, WAIT, Event
from rannd.runtime.timeline.recorder import Doing

CATEGORY = {
    Doing.FORWARD: COMPUTE,
    Doing.BACKWARD: COMPUTE,
    Doing.WEIGHT: COMPUTE,
    Doing.SEND: SEND,
    Doing.RECEIVE: RECEIVE,
    Doing.SETTLE: WAIT,
    Doing.REDUCE: REDUCE,
    Doing.DRAIN: WAIT,
    Doing.AGREE: WAIT,
    Doing.PACK: SEND,
}
_NAMES = {
    Doing.REDUCE: "R",
    Doing.DRAIN: "reductions",
    Doing.SETTLE: "sends",
    Doing.AGREE: "agreement",
    Doing.PACK: "gradients",
}


class RankEvent(msgspec.Struct, frozen=True, array_like=True):
    """An event on a rank's clock."""

    category: str
    name: str
    begin_ns: int
    end_ns: int


class RankSteps(msgspec.Struct, frozen=True):
    """Events of one step of a rank, and when it left the agreements of several."""

    number: int
    """Of the step; -1: there is none."""
    slot: int
    node: int
    begin_ns: int
    """When it came to the agreement of the step."""
    events: tuple[RankEvent, ...]
    agreed_ns: dict[int, int]
    """By the number of the step."""


def rank_events(events: Iterable[tuple[Doing, Action | None, int, int]]) -> tuple[RankEvent, ...]:
    """Name the events of a rank."""
    return tuple(
        RankEvent(CATEGORY[kind], _NAMES.get(kind, "") if action is None else str(action), begin, end)
        for kind, action, begin, end in events
    )


def join(ranks: Sequence[RankSteps]) -> tuple[list[Event], float]:
    """Return the events of all ranks, from the first one's begin, and when the last rank had come to the step."""
    by_node: dict[int, list[RankSteps]] = defaultdict(list)
    for rank in ranks:
        by_node[rank.node].append(rank)
    first = ranks[0]
    ahead = {
        node: 0 if node == first.node else clock_ahead(first.agreed_ns, [rank.agreed_ns for rank in there])
        for node, there in by_node.items()
    }
    starts = [rank.begin_ns - ahead[rank.node] for rank in ranks]
    zero = min(starts)
    events = []
    for rank in ranks:
        for each in rank.events:
            begin = (each.begin_ns - ahead[rank.node] - zero) / 1e3
            events.append(Event(rank.slot, each.category, begin, (each.end_ns - each.begin_ns) / 1e3, each.name))
    return sorted(events), (max(starts) - zero) / 1e3


def clock_ahead(first: Mapping[int, int], there: Iterable[Mapping[int, int]]) -> int:
    """Return the nanoseconds by which the clock of a node is ahead of that of a rank on another one.

    Given is when the rank, and ranks on the node, have left the agreements of steps, by the numbers of these.
    """
    found = [rank[step] - first[step] for rank in there for step in rank.keys() & first]
    return round(statistics.median(found)) if found else 0
