"""Compiles this rank's stage of a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch.fx import Node

from rannd import log
from rannd.config import Config
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import Part
from rannd.plan.blocks.repeated_layers import parts_of
from rannd.runtime.comm.context import Context
from rannd.runtime.compiling.compiled_stage import CompiledStage, Way
from rannd.runtime.compiling.compiler import Code
from rannd.runtime.compiling.kept_code import KeptCode
from rannd.runtime.compiling.kinds import Kind, TensorLayout, kind_of
from rannd.runtime.compiling.layouts import layouts_of
from rannd.runtime.compiling.sharing import compile_shared, compiled
from rannd.runtime.compiling.stage_units import Unit, units_of

SIZES = 2
"""Maximum number of sizes of pieces that code is compiled for: those that a mini-batch is divided into."""


@dataclass(frozen=True)
class StageToCompile:
    """This rank's stage of a graph, or a segment of it, with what it is run on."""

    graph: ModelGraph
    part: Part
    members: Set[Node]
    """Placed nodes of the stage."""
    tensors: Mapping[str, torch.Tensor]
    """Its parameters, buffers and constants, or others of the same layout."""
    recompute: bool
    live: frozenset[Node]
    """Nodes that get a gradient if backward begins at all results, or inside the call."""
    inside: bool
    """Whether backward runs inside the call, from the loss."""
    pieces: Sequence[int]
    """Rows of all pieces of a mini-batch."""


def compile_stages(context: Context, stages: Sequence[StageToCompile]) -> list[CompiledStage]:
    """Compile the units of parts of a stage, or load what an earlier run has compiled. Collective over all ranks."""
    kept = KeptCode(context.world.device, context.config.cache)
    units = [
        units_of(each.graph, each.members, _blocks(context.config, each.graph), each.live, inside=each.inside)
        for each in stages
    ]
    kinds = [_kinds(context, stage, each) for stage, each in zip(stages, units, strict=True)]
    wanted: dict[str, Kind] = {}
    for by_way in kinds:
        for listed in by_way.values():
            wanted.update((kind.digest, kind) for kind in listed if kind is not None and kind.digest not in wanted)
    found = compile_shared(context, kept, wanted)
    _tell_eager(context, [unit for each in units for unit in each])

    def code(kind: Kind | None) -> Code | None:
        here = None if kind is None else found[kind.digest]
        return here if isinstance(here, Code) else None

    def made(stage: StageToCompile, mine: Sequence[Unit], by_way: Mapping[Way, list[Kind | None]]) -> CompiledStage:
        def again(number: int, way: Way, arguments: Sequence[torch.Tensor]) -> Code | None:
            rows, grad, _ = way
            layouts, mode = list(map(TensorLayout.of, arguments)), stage.graph.signature.mode
            kind = kind_of(mine[number].part, rows, stage.live, layouts, mode, grad=grad)
            where, before = context.world.watch.where, context.world.watch.where.preparing
            where.preparing = True
            try:
                new = compiled(kept, kind, context.world.local_size)
            finally:
                where.preparing = before
            return new if isinstance(new, Code) else None

        return CompiledStage(stage.part, mine, {way: list(map(code, each)) for way, each in by_way.items()}, again)

    return [made(*each) for each in zip(stages, units, kinds, strict=True)]


def _kinds(context: Context, stage: StageToCompile, units: Sequence[Unit]) -> dict[Way, list[Kind | None]]:
    """The kind of each unit for each way in which it is run; None for those that run eagerly."""
    graph, device = stage.graph, context.world.device
    records = graph.signature.mode.grad
    differentiable = stage.live if stage.inside else graph.placement.requires_grad
    kinds: dict[Way, list[Kind | None]] = {}
    for rows in _sizes(stage.pieces):
        for grad in {records, records and not stage.recompute}:
            layouts = layouts_of(graph, units, stage.tensors, rows, differentiable, stage.live, device, grad=grad)
            kinds[rows, grad, stage.inside] = [
                None if unit.eager else kind_of(unit.part, rows, stage.live, each, graph.signature.mode, grad=grad)
                for unit, each in zip(units, layouts, strict=True)
            ]
    return kinds


def _blocks(config: Config, graph: ModelGraph) -> Sequence[Sequence[int]]:
    """What is compiled together, as numbers of operators: the layers that are measured and placed together, or all."""
    if config.compile_stages == "stages":
        return [range(len(graph.task.ops))]
    return parts_of(graph.task, compiled=True).grains


def _sizes(pieces: Iterable[int]) -> list[int]:
    """The most frequent sizes of pieces, larger ones first."""
    counted = Counter(rows for rows in pieces if rows)
    return sorted(sorted(counted, key=lambda rows: (-counted[rows], -rows))[:SIZES], reverse=True)


def _tell_eager(context: Context, units: Sequence[Unit]) -> None:
    """One line for each reason why units of this rank's stage run eagerly."""
    counted = Counter(unit.eager for unit in units if unit.eager)
    for why, count in counted.items():
        what = "1 block runs" if count == 1 else f"{count} blocks run"
        log.get("RaNNCModule").info("%s eagerly on rank %d: %s", what, context.world.rank, why)
