"""Compiles this rank's stages of a bound graph for the pieces of the mini-batches that it was traced for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rannd.runtime.binding.bound_graph import BoundGraph, BoundStage, Segment
from rannd.runtime.binding.microbatches import Pieces
from rannd.runtime.comm.context import Context
from rannd.runtime.compiling.compiled_stage import CompiledStage
from rannd.runtime.compiling.stage_compiling import StageToCompile, compile_stages
from rannd.runtime.execution.shared_batch import rows_by_slot


def compile_bound(
    context: Context, bound: BoundGraph, state: Mapping[str, torch.Tensor], rows: Sequence[int]
) -> dict[int, list[CompiledStage]]:
    """Compile the segments of each stage, by its number; {} if `compile_stages` is off. Collective over all ranks.

    `state`: this rank's tensors by name. `rows`: rows of each rank's mini-batch.
    """
    if context.config.compile_stages == "off":
        return {}
    world = context.world
    by_slot = tuple(rows[rank] for rank in world.rank_of_slot)
    if context.options.shared:
        by_slot = rows_by_slot(world, bound.graph, rows[0])
    inside = bound.runs_backward_inside(wanted=context.config.interleave_loss, scaled=context.options.scaled)
    if inside and bound.interleaved is not None:
        live = bound.interleaved.live
    else:
        live = bound.live((True,) * len(bound.graph.traced.results))
    pieces = Pieces(bound.layout, by_slot).rows
    segments = [
        StageToCompile(
            bound.graph,
            each.part,
            each.members,
            _tensors(bound, stage, each, state, world.device),
            each.recompute,
            live,
            inside,
            pieces,
        )
        for stage in bound.stages
        for each in stage.segments
    ]
    found = iter(compile_stages(context, segments))
    return {stage.number: [next(found) for _ in stage.segments] for stage in bound.stages}


def _tensors(
    bound: BoundGraph,
    stage: BoundStage,
    segment: Segment,
    state: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The tensors that a segment reads, or others like those that other ranks lend."""
    tensors = {}
    for name in segment.part.tensors:
        held = stage.constants.get(name, state.get(name))
        if held is None:
            like = bound.graph.traced.named(name)
            held = torch.empty(like.shape, dtype=like.dtype, device=device)
        tensors[name] = held
    return tensors
