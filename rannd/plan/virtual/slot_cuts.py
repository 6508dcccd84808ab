"""Cuts for slots with several stages: the runs of blocks with which a pipeline of equal replicas takes the least time.

A step takes as long as its busiest slot computes, whose stages are not neighbours, and the time until the last slot of
the pipeline can begin::

    E = pieces * (longest round of a slot, all of its stages) + (positions - 1) * (longest fill of a stage)

This is the time of interleaved 1F1B and of ZB-V with equal stages and without transfers (Narayanan et al. 2021, section
2.2; Qi et al. 2024, section 6). What delayed gradients fill of a stage's time, under ZB-V twice, is no fill.

Partial plans are extended by a stage at a time, from the first block on. Those whose slots need more memory than there
is, or whose lower bound of E is no better than a plan that is known, are dropped. Of those that are left the most
promising are kept: the result is exact as long as none had to be given up.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from rannd.plan.topology import Counts, Mask, Table

WIDTHS = (16, 256)
"""Partial plans that are kept after each stage: of a first search, and of one that knows its result."""


class SlotCosts(msgspec.Struct, frozen=True):
    """What cuts are compared by. Tables are ``[first block, end]``, microseconds and bytes."""

    homes: Sequence[int]
    """Position of each stage."""
    pieces: int
    """Microbatches of a slot."""
    rounds: Table
    """Time of a microbatch, forward and backward."""
    fill: Table
    """Of it, what is paid once for each position but one."""
    held: Sequence[Sequence[Table]]
    """Bytes of each stage, beside `working`, at each moment that counts for its slot."""
    working: Table
    """Temporary bytes, of one stage of a slot at a time."""
    limit: float
    """Bytes of a device."""
    may_begin: Mask
    """Whether a stage may begin at each block; the last entry is for the end."""


class SlotCuts(msgspec.Struct, frozen=True):
    """The first block of each stage."""

    starts: tuple[int, ...]
    e_us: float
    most_bytes: float
    """Bytes of the fullest slot."""
    exact: bool
    """Whether no other cuts can have a smaller E; False if some were given up."""


def best_cuts(costs: SlotCosts, widths: Sequence[int] = WIDTHS, *, enough: float = 0.0) -> SlotCuts | None:
    """Return the cuts with the smallest E that fit memory; None if none were found.

    `enough`: how much longer than with even slots and stages a step may be without looking on.
    """
    positions, stages = max(costs.homes) + 1, len(costs.homes)
    least = costs.pieces * costs.rounds[0, -1] / positions + (positions - 1) * costs.fill[0, -1] / stages
    best: SlotCuts | None = None
    for width in widths:
        best = _search(costs, width, best) or best
        if best is not None and (best.exact or best.e_us <= least * (1 + enough)):
            break
    return best


def e_of_cuts(costs: SlotCosts, starts: Sequence[int]) -> tuple[float, float]:
    """Return E and the bytes of the fullest slot of given cuts."""
    homes, ends = np.array(costs.homes), [*starts[1:], len(costs.rounds) - 1]
    rounds, fill = (each[list(starts), ends] for each in (costs.rounds, costs.fill))
    held, working = np.zeros((homes.max() + 1, max(map(len, costs.held)))), np.zeros(homes.max() + 1)
    for home, each, start, end in zip(homes, costs.held, starts, ends, strict=True):
        held[home, : len(each)] += [table[start, end] for table in each]
    np.maximum.at(working, homes, costs.working[list(starts), ends])
    e_us = costs.pieces * np.bincount(homes, rounds).max() + homes.max() * fill.max()
    return float(e_us), float((held.max(axis=1) + working).max())


def _search(costs: SlotCosts, width: int, known: SlotCuts | None) -> SlotCuts | None:
    """Return cuts that are better than `known`, or `known` if it is proved to be the best; otherwise None."""
    homes = np.array(costs.homes)
    stages, positions, blocks = len(homes), int(homes.max()) + 1, len(costs.rounds) - 1
    most = known.e_us if known is not None else np.inf
    left_us = costs.rounds[:, blocks]
    evenest = _evenest(costs.fill, stages, costs.may_begin)
    places = np.flatnonzero(costs.may_begin)
    left_stages = np.bincount(homes, minlength=positions)
    ends = np.zeros(1, dtype=np.intp)
    loads, working = np.zeros((1, positions)), np.zeros((1, positions))
    held = np.zeros((1, positions, max(map(len, costs.held))))
    longest = np.zeros(1)
    starts = np.zeros((1, 0), dtype=np.intp)
    exact = True
    for number, home in enumerate(homes):
        rest = stages - number - 1
        left_stages[home] -= 1
        later = places[(places <= blocks - rest) & (places > 0)] if rest else np.array([blocks])
        origin, way = np.nonzero(later[None, :] > ends[:, None])
        start, end = ends[origin], later[way]
        loads, working, held = loads[origin], working[origin], held[origin]
        loads[:, home] += costs.rounds[start, end]
        for place, table in enumerate(costs.held[number]):
            held[:, home, place] += table[start, end]
        working[:, home] = np.maximum(working[:, home], costs.working[start, end])
        longest = np.maximum(longest[origin], costs.fill[start, end])
        starts = np.concatenate([starts[origin], start[:, None]], axis=1)
        ends = end
        mean = (loads.sum(axis=1) + left_us[end]) / positions
        bound = costs.pieces * np.maximum(loads.max(axis=1), mean)
        bound += (positions - 1) * np.maximum(longest, evenest[rest, end])
        fits = held[:, home].max(axis=1) + working[:, home] <= costs.limit
        keep = np.flatnonzero(fits & (bound < most * (1 - 1e-12)))
        if len(keep) > width:
            exact = False
            # What the busiest slot will have, if the stages that are left are equal.
            share = left_us[end[keep]] / max(rest, 1)
            likely = (loads[keep] + left_stages * share[:, None]).max(axis=1) * costs.pieces
            likely += (positions - 1) * np.maximum(longest[keep], evenest[rest, end[keep]])
            keep = keep[np.argsort(likely, kind="stable")[:width]]
        ends, loads, held, working = ends[keep], loads[keep], held[keep], working[keep]
        longest, starts = longest[keep], starts[keep]
        if not len(ends):
            return msgspec.structs.replace(known, exact=exact) if known is not None and exact else None
    found = costs.pieces * loads.max(axis=1) + (positions - 1) * longest
    place = int(found.argmin())
    needed = float((held.max(axis=2) + working)[place].max())
    return SlotCuts(tuple(starts[place].tolist()), float(found[place]), needed, exact)


def _evenest(fill: Table, stages: int, may_begin: Mask) -> Table:
    """The smallest longest fill of the rest of the blocks: ``[stages left, first block left]``."""
    blocks = len(fill) - 1
    found = np.full((stages + 1, blocks + 1), np.inf)
    found[0, blocks] = 0.0
    later: Counts = np.arange(blocks + 1)
    possible = (later[None, :] > later[:, None]) & may_begin[None, :] & may_begin[:, None]
    each = np.where(possible, fill, np.inf)
    for count in range(1, stages + 1):
        found[count] = np.maximum(each, found[count - 1][None, :]).min(axis=1)
    return found
