"""Makes the stages of a deployment from runs of blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.deployment import Stage, StageEstimate
from rannd.plan.stage_costs.recompute import DividedStage
from rannd.plan.stage_modules import stage_modules


def stage_name(start: int, end: int) -> str:
    """Return the name of the stage of blocks `start` to `end` - 1, as in the estimate's log lines."""
    return f"MERGE_{start}_{end - 1}"


class StagePart(msgspec.Struct, frozen=True):
    """A stage, before it has operators."""

    start: int
    """First block."""
    end: int
    """Block after the last one."""
    slots: tuple[int, ...]
    divided: DividedStage
    estimate: StageEstimate
    stays_whole: bool = False


def stages_of(graph: TaskGraph, blocks: Sequence[Block], parts: Sequence[StagePart]) -> tuple[Stage, ...]:
    """Return the stages of a deployment with their operators, modules and segments."""
    ops = [sorted(op for block in blocks[part.start : part.end] for op in block.ops) for part in parts]
    found = []
    for part, own, modules in zip(parts, ops, stage_modules(graph, ops), strict=True):
        divided, segment_of = part.divided, {}
        several = len(divided.ends) > 1
        if several:
            for place, block in enumerate(blocks[part.start : part.end]):
                segment_of.update(dict.fromkeys(block.ops, bisect_right(divided.ends, place)))
        found.append(
            Stage(
                name=stage_name(part.start, part.end),
                ops=tuple(graph.ops[op].name for op in own),
                slots=part.slots,
                recompute=any(divided.again),
                estimate=part.estimate,
                modules=modules,
                segment_of=tuple(segment_of[op] for op in own) if several else (),
                recomputed=divided.again if several else (),
                stays_whole=part.stays_whole,
            )
        )
    return tuple(found)
