"""Times of a rank from the sums of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rannd.plan.measured_step import EdgeWaits, RankTimes, StageTimes, Typical
from rannd.runtime.timeline.recorder import COMPUTING, Doing, Place, StepRow

WAITING, CALM = 0.02, 0.75
"""Part of a step that computations may wait for processors that other processes have, and part of all steps in which
they may not wait longer, so that it is known what reductions take."""


def rank_times(rows: Sequence[StepRow], slot: int, stages: Sequence[int]) -> RankTimes:
    """Return the times of a rank.

    Args:
        rows: Its steps, alike; none: all times are 0.
        slot: Its slot.
        stages: Its stages, ascending.
    """
    own = []
    for stage in stages:
        pieces = statistics.median([_count(row, (Doing.FORWARD, stage, stage)) for row in rows] or [0])
        own.append(StageTimes(stage, int(pieces), *(_typical(rows, (kind, stage, stage)) for kind in COMPUTING)))
    edges = sorted({(src, dst) for row in rows for kind, src, dst in row.sums if kind is Doing.RECEIVE})
    waits = []
    for src, dst in edges:
        place = Doing.RECEIVE, src, dst
        messages = statistics.median(_count(row, place) for row in rows)
        waits.append(EdgeWaits(src, dst, int(messages), _middle([_us(row, place) for row in rows])))
    every = {kind: [_all_us(row, kind) for row in rows] for kind in Doing}
    calls, agrees = every[Doing.CALL], every[Doing.AGREE]
    calm = [row for row in rows if _is_calm(row)]
    sends = statistics.median([_all_count(row, Doing.SEND) for row in rows] or [0])
    return RankTimes(
        slot,
        len(rows),
        tuple(own),
        tuple(waits),
        step_us=_middle([max(call - agree, 0.0) for call, agree in zip(calls, agrees, strict=True)]),
        agree_us=_middle(agrees),
        send_us=_middle(every[Doing.SEND]),
        settle_us=_middle(every[Doing.SETTLE]),
        reduce_us=_middle(every[Doing.REDUCE]),
        drain_us=_middle(every[Doing.DRAIN]),
        between_us=_middle(
            [max((row.end_ns - row.begin_ns) / 1e3 - call, 0.0) for row, call in zip(rows, calls, strict=True)]
        ),
        sends=int(sends),
        host_us=_middle([row.host_ns / 1e3 for row in rows]),
        threads_us=_middle([row.delays.get((Doing.CALL, -1), (0, 0))[1] / 1e3 for row in rows]),
        pack_us=_middle(every[Doing.PACK]),
        reduced_us=_middle([_reduced_us(row) for row in calm]) if len(calm) >= CALM * len(rows) else 0.0,
    )


def _count(row: StepRow, place: Place) -> int:
    return row.sums.get(place, (0, 0))[0]


def _us(row: StepRow, place: Place) -> float:
    return row.sums.get(place, (0, 0))[1] / 1e3


def _all_us(row: StepRow, kind: Doing) -> float:
    return sum(ns for place, (_, ns) in row.sums.items() if place[0] is kind) / 1e3


def _all_count(row: StepRow, kind: Doing) -> int:
    return sum(count for place, (count, _) in row.sums.items() if place[0] is kind)


def _typical(rows: Sequence[StepRow], place: Place) -> Typical:
    each, own, threads = [], [], []
    for row in rows:
        if count := _count(row, place):
            us, delays = _us(row, place), _delays_us(row, place)
            if place[0] is _completing(row, place[1]):
                packing = Doing.PACK, *place[1:]
                us -= _us(row, packing)
                delays = [one - inside for one, inside in zip(delays, _delays_us(row, packing), strict=True)]
            each.append(us / count)
            own.append(max(us - sum(delays), 0.0) / count)
            threads.append(max(delays[1], 0.0) / count)
    if not each:
        return Typical()
    return Typical(_middle(each), _middle(own), _middle(threads))


def _delays_us(row: StepRow, place: Place) -> list[float]:
    return [ns / 1e3 for ns in row.delays.get(place[:2], (0, 0))]


def _completing(row: StepRow, stage: int) -> Doing:
    """Return which of a stage's computations completes gradients, in which they are packed."""
    return Doing.WEIGHT if _count(row, (Doing.WEIGHT, stage, stage)) else Doing.BACKWARD


def _reduced_us(row: StepRow) -> float:
    """Return what reductions made a step longer."""
    threads_us = sum(threads for (kind, _), (_, threads) in row.delays.items() if kind in COMPUTING) / 1e3
    inside_us = sum(threads for (kind, _), (_, threads) in row.delays.items() if kind is Doing.PACK) / 1e3
    return _all_us(row, Doing.DRAIN) + _all_us(row, Doing.PACK) + max(threads_us - inside_us, 0.0)


def _is_calm(row: StepRow) -> bool:
    """Whether other processes have left the rank its processor."""
    others_us = sum(others for (kind, _), (others, _) in row.delays.items() if kind in COMPUTING) / 1e3
    return others_us <= WAITING * _all_us(row, Doing.CALL)


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
