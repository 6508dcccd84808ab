"""Costs of blocks from measurements of their parts. No torch in this file: some processes plan without it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rannd.graph.fx.ir import TaskGraph
from rannd.graph.partition.block_hash import block_hashes, crossing
from rannd.plan.blocks.blocks import Block
from rannd.profile.costs import BlockCost
from rannd.profile.kept_values import Memory
from rannd.profile.points import Measured, total

Ops = tuple[int, ...]
"""Indices of operators of the task graph that are measured together."""


@dataclass(frozen=True)
class MeasuredParts:
    """What of a graph is measured: parts, whose costs add up to those of blocks."""

    task: TaskGraph
    measured: Sequence[Ops]
    """Sets of operators that are measured: grains or atoms."""
    toolchain: str = ""
    """What compiles them; empty: nothing does."""

    def hashes(self, parts: Sequence[Ops]) -> list[str]:
        """Hash of each part, by which its measurements are known; others for compiled code."""
        found = block_hashes(self.task, parts)
        return [f"{each} {self.toolchain}" for each in found] if self.toolchain else found

    def of(self, blocks: Sequence[Block]) -> list[list[Ops]]:
        """Parts of each block: its atoms, or its grains and its parts of split grains."""
        owner = {op: number for number, block in enumerate(blocks) for op in block.ops}
        found: list[list[Ops]] = [[] for _ in blocks]
        for part in self.measured:
            for number in sorted({owner[op] for op in part}):
                found[number].append(tuple(op for op in part if owner[op] == number))
        return found

    def wanted(self, blocks: Sequence[Block]) -> dict[str, Ops]:
        """All different parts of blocks, by hash."""
        parts = [ops for each in self.of(blocks) for ops in each]
        return dict(zip(self.hashes(parts), parts, strict=True))

    def costs(self, blocks: Sequence[Block], profile: Mapping[str, Measured], most: int) -> tuple[BlockCost, ...]:
        """Costs of blocks for microbatches of up to `most` rows. KeyError for a part that was not measured."""
        parts = self.of(blocks)
        flat = [ops for each in parts for ops in each]
        known = iter(zip(self.hashes(flat), crossing(self.task, flat), strict=True))
        memory = Memory(self.task)
        found = [[profile[key].cost(most, border) for key, border in (next(known) for _ in each)] for each in parts]
        return tuple(total(each, memory) for each in found)
