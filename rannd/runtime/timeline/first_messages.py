"""How long messages between stages are on their way in steps, by the first one of each edge in a step.

The receiver has nothing else to do then and waits for it. Later ones may lie there before they are wanted, so that
nobody knows when they came.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import Flight
from rannd.runtime.timeline.joined_timeline import clock_ahead
from rannd.runtime.timeline.recorder import Doing, StepRow


class FirstMessages(msgspec.Struct, frozen=True):
    """When a rank had sent, and had got, the first message of each edge in its steps."""

    slot: int
    node: int
    agreed_ns: dict[int, int]
    """By the number of the step, when it left the agreement of the ranks."""
    sent_ns: dict[int, dict[str, int]]
    """By number of the step and edge (``0>1``), on the rank's clock."""
    got_ns: dict[int, dict[str, int]]

    @staticmethod
    def of(rows: Sequence[StepRow], slot: int, node: int) -> FirstMessages:
        """Return those of steps of a rank."""
        sent, got = (
            {row.number: {_edge(*edge): ns for (each, *edge), ns in row.firsts.items() if each is kind} for row in rows}
            for kind in (Doing.SEND, Doing.RECEIVE)
        )
        return FirstMessages(slot, node, {row.number: row.agreed_ns for row in rows}, sent, got)


def flights(ranks: Sequence[FirstMessages], deployment: Deployment) -> tuple[Flight, ...]:
    """Return how long values are on their way from a stage to the next one, medians over steps and pairs of ranks.

    Args:
        ranks: All ranks, by slot.
        deployment: What they run. Stages with other numbers of replicas than the one before are left out, and plans
            with several stages on a slot, in which the first message may find its receiver busy.
    """
    if sum(len(stage.slots) for stage in deployment.stages) > len(deployment.slots):
        return ()
    found = []
    for dst, (stage, after) in enumerate(pairwise(deployment.stages), start=1):
        if len(stage.slots) != len(after.slots):
            continue
        times: dict[bool, list[float]] = {}
        for sender, receiver in zip(stage.slots, after.slots, strict=True):
            one, other = ranks[sender], ranks[receiver]
            ahead = 0 if one.node == other.node else clock_ahead(one.agreed_ns, [other.agreed_ns])
            edge = _edge(dst - 1, dst)
            for step, sent in one.sent_ns.items():
                got = other.got_ns.get(step, {})
                if edge in sent and edge in got:
                    us = (got[edge] - ahead - sent[edge]) / 1e3
                    times.setdefault(one.node != other.node, []).append(max(us, 0.0))
        found += [Flight(dst - 1, dst, between, statistics.median(us)) for between, us in sorted(times.items())]
    return tuple(found)


def _edge(src: int, dst: int) -> str:
    return f"{src}>{dst}"
