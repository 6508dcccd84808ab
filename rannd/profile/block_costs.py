"""What a model's parts cost: each structure is measured on one of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
from torch.fx import Node

from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import Part, extract
from rannd.log import Progress
from rannd.profile.measure import ProfileInputs, finish, measure
from rannd.profile.points import Measured, middle

TURNS = 3
"""Each part is measured so often, some time apart: what else the machine does for a second is not in the median."""
LONG_S = 2.0
"""But for parts that have taken so long."""

_found = msgspec.msgpack.Decoder(dict[str, Measured])


def block_part(graph: ModelGraph, ops: Sequence[int], name: str = "Block") -> Part:
    """A block (op numbers of the task graph) as a part that can run alone."""
    nodes: list[Node] = list(graph.nodes.values())
    return extract(graph.traced, graph.placement, {nodes[op] for op in ops}, name)


def measure_missing(
    missing: Mapping[str, tuple[int, ...]],
    part_of: Callable[[str], tuple[Part, Sequence[str]]],
    sample: ProfileInputs,
    *,
    rank: int,
    world: int,
    gather: Callable[[bytes], list[bytes]],
    tell: Callable[[float], None] | None = None,
) -> dict[str, Measured]:
    """Measure what is `missing` (numbers of rows, by hash of a block), each block on one of `world` ranks.

    Collective. `part_of`: a block, and the names of what crosses its border, see `measure`. `gather` gives every rank
    the bytes of all. `tell` is told which part of it this rank has done. A ProfileError on one rank is raised there.
    """
    mine = list(missing)[rank::world]
    parts: dict[str, tuple[Part, Sequence[str]]] = {}
    found: dict[str, list[Measured]] = {key: [] for key in mine}
    took = dict.fromkeys(mine, 0.0)
    count = len(mine) * TURNS
    with Progress("GraphProfiler", "Measured {done} of {total} parts", count, shown=rank == 0, tell=tell) as progress:
        for _ in range(TURNS):
            for key in mine:
                earlier = found[key]
                if key not in parts:
                    parts[key] = part_of(key)
                if took[key] < LONG_S and not any(each.too_many for each in earlier):
                    start = time.perf_counter()
                    rows = [point.rows for point in earlier[0].points] if earlier else missing[key]
                    measured = measure(parts[key][0], sample, rows, parts[key][1], again=bool(earlier))
                    if not measured.too_many or not earlier:  # memory that something else takes now says nothing
                        earlier.append(measured)
                    took[key] += time.perf_counter() - start
                progress.step()
    finish()
    merged: dict[str, Measured] = {}
    for data in gather(msgspec.msgpack.encode({key: middle(each) for key, each in found.items()})):
        merged.update(_found.decode(data))
    return merged
