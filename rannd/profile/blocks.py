"""What a model's blocks cost: each structure is measured once, on one of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from torch.fx import Node

from rannd.graph.cut import Part, extract
from rannd.graph.model import ModelGraph
from rannd.log import Progress
from rannd.profile.measure import Sample, measure
from rannd.profile.points import Measured

_found = msgspec.msgpack.Decoder(dict[str, Measured])


def block_part(graph: ModelGraph, ops: Sequence[int], name: str = "Block") -> Part:
    """A block (op numbers of the task graph) as a part that can run alone."""
    nodes: list[Node] = list(graph.nodes.values())
    return extract(graph.traced, graph.placement, {nodes[op] for op in ops}, name)


def measure_missing(
    missing: Mapping[str, tuple[int, ...]],
    part_of: Callable[[str], tuple[Part, Sequence[str]]],
    sample: Sample,
    *,
    rank: int,
    world: int,
    gather: Callable[[bytes], list[bytes]],
) -> dict[str, Measured]:
    """Measure what is `missing` (numbers of rows, by hash of a block), each block on one of `world` ranks.

    Collective. `part_of`: a block, and the names of what crosses its border, see `measure`. `gather` gives every rank
    the bytes of all. A ProfileError on one rank is raised there.
    """
    mine = list(missing)[rank::world]
    found: dict[str, Measured] = {}
    with Progress("GraphProfiler", "Measured {done} of {total} blocks", len(mine), shown=rank == 0) as progress:
        for key in mine:
            part, crossing = part_of(key)
            found[key] = measure(part, sample, missing[key], crossing)
            progress.step()
    merged: dict[str, Measured] = {}
    for data in gather(msgspec.msgpack.encode(found)):
        merged.update(_found.decode(data))
    return merged
