"""Second phase: blocks, at most `max_partition_num` runs of atoms, which the stage search places.

Blocks are runs of consecutive atoms in topological order, so they are convex and ordered, whatever is merged; if there
are enough grains (grains.py), they consist of these. The steps follow RaNNC's multilevel partitioner (Tanaka et al.,
IPDPS 2021, section III-C); what a step merges first differs, because here a block need not be measured before it
exists:

1. coarsening   merge across boundaries, the most expensive one first, while the merged block stays below the
                mean weight of `max_partition_num` blocks. The cheap boundaries remain:

                    embed | ln qkv score proj | ln up gelu down | ln qkv score ...
                          ^ one residual value ^                ^ and not the five of an attention

2. compaction   merge the lightest block with its lighter neighbour until few enough remain (RaNNC's rule)
3. uncoarsening (optional) move each boundary to the cheapest position between its two neighbours that makes
                no block heavier than the two were

Weights are analytic, never measured: the same model gives the same blocks on every machine. Boundaries of equal cost
are handled kind by kind (a kind is determined by the ops around the boundary), so equal layers are merged in the same
way and become equal blocks.
"""

from __future__ import annotations

import heapq
import math
from itertools import accumulate, pairwise

import msgspec

from rannd.errors import PlanError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.cut_places import cut_places, has_cut_points
from rannd.plan.blocks.grains import make_grains
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.plan_options import PlanOptions

ROWS = 8
"""Number of rows at which sizes are compared; fixed, so that blocks do not depend on the batch."""
FLOPS_PER_BYTE = 16.0
"""FLOPs that take the time of touching one byte: between the balance of a CPU (about 5) and a GPU (100)."""
STEPS = 8
"""Number of weight limits to try between the mean and twice the mean."""
LIGHTER = 0.8
"""Weight ratio of the heaviest blocks below which fewer blocks are preferred."""
KIND_RADIUS = 4
"""Atoms on each side that determine the kind of a boundary."""


class Block(msgspec.Struct, frozen=True):
    """A convex set of ops; a block's ops read only values of itself and of earlier blocks."""

    ops: tuple[int, ...]
    """Op indices, sorted."""


def make_blocks(parts: Partitioning, options: PlanOptions, *, world: int) -> tuple[Block, ...]:
    """Partition a graph into blocks, in topological order, for a plan on `world` devices.

    Blocks consist of grains, or of atoms if a plan may have more stages than there are grains. There are at most
    `options.max_partition_num` blocks (or `partition_num`, if that is more) and, if possible, as many as a plan may
    have stages; coarsening leaves at least `min_partition_num`. No block crosses a CutPoint; if there are more
    CutPoints than blocks are allowed, blocks begin only at CutPoints.

    Raises:
        PlanError: The graph has no op.
    """
    graph, atoms, grains = parts.graph, parts.atoms, parts.grains
    stages = max(options.partition_num, world * options.passes)
    if not atoms:
        raise PlanError("the model has no op to place: its outputs do not depend on the batch; nothing to plan")
    most = max(options.max_partition_num, options.partition_num)
    places = cut_places(graph, atoms)
    if has_cut_points(graph) and sum(places) - 1 > most:
        starts = [at for at, allowed in enumerate(places[:-1]) if allowed]
        ends = [*starts[1:], len(atoms)]
        atoms = tuple(
            tuple(sorted(op for atom in atoms[start:end] for op in atom))
            for start, end in zip(starts, ends, strict=True)
        )
        places = [False] * (len(atoms) + 1)
        grains = make_grains(graph, atoms)
    if len(grains) >= min(len(atoms), stages):
        atoms = grains
        places = cut_places(graph, atoms) if any(places) else [False] * (len(atoms) + 1)
    fixed = {at for at, allowed in enumerate(places) if allowed} if has_cut_points(graph) else set()
    fewest = min(len(atoms), most, max(options.min_partition_num, stages))

    flops_per_byte = FLOPS_PER_BYTE if options.coarsen_by_time else math.inf
    weights = [sum(op_weight(graph, op, flops_per_byte) for op in atom) for atom in atoms]
    line = _Line(weights, boundary_bytes(graph, atoms), fixed)
    if options.do_coarsening:
        line.even_out(most, fewest, _kinds(graph, atoms))
    line.compact(most)
    if options.do_uncoarsening:
        line.uncoarsen()
    ends = [*line.cuts[1:], len(atoms)]
    return tuple(
        Block(ops=tuple(sorted(op for atom in atoms[start:end] for op in atom)))
        for start, end in zip(line.cuts, ends, strict=True)
    )


class _Line:
    """Atoms in order, partitioned into blocks; `cuts` are the first atoms of the blocks."""

    def __init__(self, weights: list[float], boundary: list[int], fixed: set[int]) -> None:
        self.fixed = fixed
        """Cuts that must not be removed."""
        self.cuts = list(range(len(weights)))
        self.boundary = boundary
        self._sums = list(accumulate(weights, initial=0.0))

    @property
    def total(self) -> float:
        return self._sums[-1]

    def weight(self, start: int, end: int) -> float:
        return self._sums[end] - self._sums[start]

    def even_out(self, most: int, fewest: int, kinds: list[int]) -> None:
        """Run `coarsen` with the lowest weight limit, or a higher one that makes the heaviest block much lighter.

        With the mean weight of `most` blocks as the limit, too many blocks remain if equal layers do not divide evenly:
        of 144 layers, 36 blocks of 4. Compaction then merges four pairs into blocks of 8; a higher limit gives 28
        blocks of 5, and one of 4.
        """
        every, best = self.cuts, None
        for step in range(STEPS + 1):
            self.cuts = every
            self.coarsen(2 ** (step / STEPS) * self.total / most, fewest, kinds)
            enough = len(self.cuts) <= most
            self.compact(most)
            heaviest = max(self.weight(start, end) for start, end in pairwise([*self.cuts, len(self._sums) - 1]))
            if best is None or heaviest < LIGHTER * best[0]:
                best = heaviest, self.cuts
            if enough:
                break
        assert best is not None
        self.cuts = best[1]

    def coarsen(self, cap: float, fewest: int, kinds: list[int]) -> None:
        """Remove cuts, expensive ones first, kind by kind, while blocks stay within `cap`."""
        count = len(self._sums) - 1
        start_of_end = {end: start for start, end in zip(self.cuts, [*self.cuts[1:], count], strict=True)}
        end_of_start = {start: end for end, start in start_of_end.items()}
        left = len(self.cuts)
        for cut in sorted(range(1, count), key=lambda at: (-self.boundary[at], kinds[at], at)):
            if left <= fewest:
                break
            if cut in self.fixed:
                continue
            start, end = start_of_end[cut], end_of_start[cut]
            if self.weight(start, end) <= cap:
                start_of_end[end], end_of_start[start] = start, end
                del start_of_end[cut], end_of_start[cut]
                left -= 1
        self.cuts = sorted(end_of_start)

    def uncoarsen(self) -> None:
        """Move each cut, from left to right, to the cheapest position between its neighbours that adds no weight."""
        bounds = [*self.cuts, len(self._sums) - 1]
        for index in range(1, len(bounds) - 1):
            before, here, after = bounds[index - 1 : index + 2]
            if here in self.fixed:
                continue
            limit = max(self.weight(before, here), self.weight(here, after))
            places = [
                at
                for at in range(before + 1, after)
                if self.weight(before, at) <= limit and self.weight(at, after) <= limit
            ]
            bounds[index] = min([here, *places], key=lambda at: (self.boundary[at], abs(at - here), at))
        self.cuts = bounds[:-1]

    def compact(self, most: int) -> None:
        """Merge the lightest block with its lighter neighbour until at most `most` remain."""
        count = len(self._sums) - 1
        following = dict(zip(self.cuts, [*self.cuts[1:], count], strict=True))
        previous = {after: start for start, after in following.items()}
        lightest = [(self.weight(start, end), start, end) for start, end in following.items()]
        heapq.heapify(lightest)
        while len(following) > most and lightest:
            _, start, end = heapq.heappop(lightest)
            if following.get(start) != end:
                continue  # merged since it was pushed
            sides = []
            if start in previous and start not in self.fixed:
                sides.append((self.weight(previous[start], start), -self.boundary[start], start))
            if end in following and end not in self.fixed:
                sides.append((self.weight(end, following[end]), -self.boundary[end], end))
            if not sides:
                continue
            gone = min(sides)[2]
            start, end = previous[gone], following.pop(gone)
            following[start], previous[end] = end, start
            del previous[gone]
            heapq.heappush(lightest, (self.weight(start, end), start, end))
        self.cuts = sorted(following)


def op_weight(graph: TaskGraph, number: int, flops_per_byte: float = FLOPS_PER_BYTE) -> float:
    """Return the analytic time of an op, in bytes: what it touches plus its FLOPs at a fixed balance."""
    op = graph.ops[number]
    values = sum(graph.values[value].bytes.at(ROWS) for value in (*op.inputs, *op.outputs))
    return values + sum(graph.params[param].bytes for param in op.params) + op.flops.at(ROWS) / flops_per_byte


def boundary_bytes(graph: TaskGraph, atoms: tuple[tuple[int, ...], ...]) -> list[int]:
    """Return the cost in bytes of a cut before each of some sets of ops, in order.

    It counts values that are produced before the cut and read after it, once each, and trainable parameters that are
    read on both sides, whose gradients would have to be summed across stages.
    """
    place = {op: index for index, atom in enumerate(atoms) for op in atom}
    first: dict[tuple[str, int], int] = {}
    last: dict[tuple[str, int], int] = {}
    for index, op in enumerate(graph.ops):
        for value in op.inputs:
            if graph.values[value].producer >= 0:
                first[("value", value)] = place[graph.values[value].producer]
                last[("value", value)] = max(last.get(("value", value), 0), place[index])
        for param in op.params:
            if graph.params[param].trainable:
                first[("param", param)] = min(first.get(("param", param), len(atoms)), place[index])
                last[("param", param)] = max(last.get(("param", param), 0), place[index])
    steps = [0] * (len(atoms) + 2)
    for key, start in first.items():
        kind, index = key
        size = round(graph.values[index].bytes.at(ROWS)) if kind == "value" else graph.params[index].bytes
        steps[start + 1] += size
        steps[last[key] + 1] -= size
    return list(accumulate(steps))[: len(atoms)]


def _kinds(graph: TaskGraph, atoms: tuple[tuple[int, ...], ...]) -> list[int]:
    """Return the kind number of the cut before each atom; kinds are numbered in order of occurrence."""
    labels = [
        tuple(
            (
                op.target,
                len(op.inputs),
                op.flops,
                tuple(graph.params[param].bytes for param in op.params),
                tuple(graph.values[value].bytes for value in op.outputs),
            )
            for op in (graph.ops[index] for index in atom)
        )
        for atom in atoms
    ]
    names: dict[object, int] = {}
    numbers = [names.setdefault(label, len(names)) for label in labels]
    kinds: dict[object, int] = {}
    return [
        kinds.setdefault(
            (tuple(numbers[max(at - KIND_RADIUS, 0) : at]), tuple(numbers[at : at + KIND_RADIUS])), len(kinds)
        )
        for at in range(len(atoms))
    ]
