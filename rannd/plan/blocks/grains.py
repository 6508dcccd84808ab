"""Grains: runs of atoms that blocks consist of, and that are measured.

A grain begins with an operator that multiplies or has trainable parameters, and ends where the next one begins:

    | layer_norm | linear split view | attention view | linear dropout add | layer_norm | linear gelu | linear ..

A grain depends only on its own operators, so a model with more, equal layers has the same grains and needs no new
measurements, whatever its blocks are. Stages would hardly begin inside a grain: most of its work is one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from rannd.graph.fx.ir import Op, TaskGraph
from rannd.plan.blocks.cut_places import cut_places, has_cut_points

MOST = 16
"""Maximum number of atoms in a grain."""
_FLOPS = 2.0
"""FLOPs per output byte above which an op is a product; elementwise ops have one FLOP per element (fx/flops.py)."""
_ROWS = 8
"""Number of rows at which both are compared; fixed, so that grains do not depend on the batch."""


def make_grains(graph: TaskGraph, atoms: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return sets of op indices (each sorted), in the order of `atoms`. No set crosses a CutPoint."""
    forced = cut_places(graph, atoms) if has_cut_points(graph) else [False] * (len(atoms) + 1)
    found: list[list[int]] = []
    held = 0
    for place, atom in enumerate(atoms):
        if not held or held == MOST or forced[place] or any(_is_heavy(graph, graph.ops[op]) for op in atom):
            found.append([])
            held = 0
        found[-1] += atom
        held += 1
    return tuple(tuple(sorted(ops)) for ops in found)


def multiplies(graph: TaskGraph, op: Op) -> bool:
    """Whether an operator is a product: it computes much more than it writes."""
    made = sum(graph.values[value].bytes.at(_ROWS) for value in op.outputs)
    return op.flops.at(_ROWS) > _FLOPS * made


def _is_heavy(graph: TaskGraph, op: Op) -> bool:
    return multiplies(graph, op) or any(graph.params[index].trainable for index in op.params)
