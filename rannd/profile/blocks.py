"""Costs of a model's blocks: each structure is measured once, on one of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from torch.fx import Node

from rannd import log
from rannd.graph.cut import Part, extract
from rannd.graph.model import ModelGraph
from rannd.profile.costs import BlockCost
from rannd.profile.measure import Sample, measure

PROGRESS_S = 10.0

_costs = msgspec.msgpack.Decoder(dict[str, BlockCost])


def block_parts(graph: ModelGraph, blocks: Sequence[Sequence[int]]) -> list[Part]:
    """Each block (op numbers of the task graph) as a part that can run alone."""
    nodes: list[Node] = list(graph.nodes.values())
    return [
        extract(graph.traced, graph.placement, {nodes[op] for op in ops}, f"Block{number}")
        for number, ops in enumerate(blocks)
    ]


def measure_missing(
    parts: Sequence[Part],
    hashes: Sequence[str],
    known: dict[str, BlockCost],
    sample: Sample,
    rows: Sequence[int],
    *,
    rank: int,
    world: int,
    gather: Callable[[bytes], list[bytes]],
) -> dict[str, BlockCost]:
    """Costs by hash of all structures that are not `known`, each measured by one of `world` ranks. Collective.

    `gather` gives every rank the bytes of all. A ProfileError on one rank is raised there.
    """
    logger = log.get("GraphProfiler")
    missing = [key for key in dict.fromkeys(hashes) if key not in known]
    found: dict[str, BlockCost] = {}
    told = time.monotonic()
    for number, key in enumerate(missing):
        if number % world != rank:
            continue
        found[key] = measure(parts[hashes.index(key)], sample, rows)
        if rank == 0 and time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            logger.info("Measured %d of %d blocks", number + 1, len(missing))
    merged: dict[str, BlockCost] = {}
    for data in gather(msgspec.msgpack.encode(found)):
        merged.update(_costs.decode(data))
    logger.debug("Measured %d structures of %d blocks, %d were known", len(missing), len(parts), len(known))
    return merged
