"""Layers: what is compiled together, and then measured and placed together.

Compiled code gains from many operators at once, and is made once for equal ones. So a layer is what a model repeats:

    | embed | ln attention ln mlp | ln attention ln mlp | ln attention ln mlp | ln head loss |
              `--- period: 7 grains, repeated --------------------------------'

What is not repeated is divided at the cheapest boundaries, as blocks are, into parts no heavier than a layer. Layers
depend on the graph alone: not on the number of devices, on options, or on where stages begin.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from rannd.graph.fx.ir import TaskGraph
from rannd.graph.partition.block_hash import block_hashes
from rannd.plan.blocks.blocks import boundary_bytes, make_blocks, op_weight
from rannd.plan.blocks.cut_places import cut_places, has_cut_points
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.plan_options import PlanOptions

MOST_LAYERS = 32
"""Repetitions above which several make one layer."""
LONGEST = 256
"""Maximum number of grains that are repeated."""
PARTS = 16
"""Parts of equal weight of a model that repeats nothing."""


def parts_of(graph: TaskGraph, *, compiled: bool) -> Partitioning:
    """The partitioning of a graph whose parts run as they are, or compiled."""
    parts = Partitioning.of(graph)
    return with_layers(parts) if compiled else parts


def with_layers(parts: Partitioning) -> Partitioning:
    """Return the partitioning whose grains are layers. No layer crosses a CutPoint."""
    graph, grains = parts.graph, parts.grains
    if not grains:
        return parts
    hashes = block_hashes(graph, grains)
    boundary = boundary_bytes(graph, grains)
    runs = _runs(hashes, boundary)
    weights = [sum(op_weight(graph, op) for op in grain) for grain in grains]
    most = sum(weights) / PARTS
    cuts = {0, len(grains)}
    if has_cut_points(graph):
        cuts |= {at for at, allowed in enumerate(cut_places(graph, grains)) if allowed}
    repeated = set()
    for start, period, count in runs:
        each = -(-count // MOST_LAYERS) * period
        cuts |= {*range(start, start + period * count, each), start + period * count}
        repeated |= set(range(start + 1, start + period * count))
        most = max(most, sum(weights[start : start + each]))
    begins = {grain[0]: at for at, grain in enumerate(grains)}
    blocks = [begins[block.ops[0]] for block in make_blocks(parts, PlanOptions(), world=1) if block.ops[0] in begins]
    last = 0
    for at, following in pairwise(sorted({*blocks, *cuts})):
        if at in cuts:
            last = at
        elif at not in repeated and sum(weights[last:following]) > most:
            cuts.add(at)
            last = at
    layers = (tuple(sorted(op for grain in grains[a:b] for op in grain)) for a, b in pairwise(sorted(cuts)))
    return dataclasses.replace(parts, grains=tuple(layers))


def _runs(hashes: list[str], boundary: list[int]) -> list[tuple[int, int, int]]:
    """Return (start, period, count) of what is repeated, without overlaps: what covers most grains comes first."""
    numbers: dict[str, int] = {}
    line = [numbers.setdefault(each, len(numbers)) for each in hashes]
    found: list[tuple[int, int, int]] = []
    stretches = [(0, len(line))]
    while stretches:
        low, high = stretches.pop()
        best = _longest(line, low, high, boundary)
        if best is not None:
            start, period, count = best
            found.append(best)
            stretches += [(low, start), (start + period * count, high)]
    return sorted(found)


def _longest(line: list[int], low: int, high: int, boundary: list[int]) -> tuple[int, int, int] | None:
    best, covered = None, 0
    for period in range(1, min((high - low) // 2, LONGEST) + 1):
        length = 0
        for at in range(low, high - period + 1):
            if at < high - period and line[at] == line[at + period]:
                length += 1
                continue
            count = length // period + 1
            if count > 1 and count * period > covered:
                begin = at - length
                spare = length + period - count * period
                start = min(range(begin, begin + spare + 1), key=lambda each: (boundary[each], each))
                best, covered = (start, period, count), count * period
            length = 0
    return best
