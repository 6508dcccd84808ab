"""Measures the blocks of a model: each distinct structure is measured on one of the ranks."""

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
"""Number of measurements of each block, spread over time, so that short disturbances do not enter the median."""
LONG_S = 2.0
"""Total seconds per block after which it is not measured again."""

_found = msgspec.msgpack.Decoder(dict[str, Measured])


def block_part(graph: ModelGraph, ops: Sequence[int], name: str = "Block") -> Part:
    """Extract a block (op numbers of the task graph) as a module that can run alone."""
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
    """Measure the blocks in `missing`, each on one of `world` ranks, and return the results on all ranks.

    Collective. A ProfileError on one rank is raised on that rank only.

    Args:
        missing: Row counts to measure, by hash of the block.
        part_of: Returns a block and the names of the values that cross its border, see `measure`.
        sample: Inputs and parameters for the measurements.
        rank: Number of this rank.
        world: Number of ranks.
        gather: All-gather of bytes over the ranks.
        tell: Called with the fraction of its blocks that this rank has measured.
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
                    if not measured.too_many or not earlier:  # out of memory in a repeated run is due to something else
                        earlier.append(measured)
                    took[key] += time.perf_counter() - start
                progress.step()
    finish()
    merged: dict[str, Measured] = {}
    for data in gather(msgspec.msgpack.encode({key: middle(each) for key, each in found.items()})):
        merged.update(_found.decode(data))
    return merged
