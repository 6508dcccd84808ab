"""Check whether an exported program is valid for all batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch.fx import Graph

from rannd.graph.call.signature import Signature
from rannd.graph.fx.sizes import PROBE_ROWS, holds, shape_at
from rannd.graph.fx.symbolic_values import TensorValue, abstract

MOST_ROWS = 2**20
"""The batch dimension counts as dynamic only if sizes up to this one are allowed."""

OF_KERNELS = frozenset({65_535, 131_070, 262_136, 880_801})
"""Largest batches of cuDNN's BatchNorm (of samples or of images, in training or evaluation). In the operator of a graph
torch chooses the kernel anew, so these do not bound what the graph is valid for."""

MOST_HOLES = 4
"""Maximum number of single excluded sizes; more of them follow a rule (even sizes, multiples)."""

LARGEST_CONDITION = 65
"""Conditions on the batch size are evaluated for sizes from 3 to below this. Size 2 is left out, since torch excludes
slices of size 1."""


def closed_batch(program: Any, signature: Signature) -> tuple[str, int, int] | None:
    """Find a batch argument whose first dimension is not dynamic; returns its name and the allowed (lowest, highest)
    size."""
    return _fixed(program, signature) or _excluded(program, signature)


def _fixed(program: Any, signature: Signature) -> tuple[str, int, int] | None:
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec, name in zip(signature.tensors, program.graph_signature.user_inputs, strict=True):
        if not spec.batch or not isinstance(name, str):
            continue
        size = placeholders[name].meta["val"].shape[0]
        symbols = size.node.expr.free_symbols if isinstance(size, torch.SymInt) else ()
        if not symbols:
            return spec.name, int(size), int(size)
        for symbol in symbols:
            bounds = program.range_constraints.get(symbol)
            if bounds is not None and not (bounds.lower <= 2 and is_wide(bounds.upper)):
                return spec.name, int(bounds.lower), int(min(bounds.upper, MOST_ROWS))
    return None


def is_wide(upper: Any) -> bool:
    """Whether the largest allowed size is no limit."""
    return bool(upper >= MOST_ROWS) or upper in OF_KERNELS


def _excluded(program: Any, signature: Signature) -> tuple[str, int, int] | None:
    """Like `_fixed`, for ranges of sizes excluded by conditions in the model's code (odd or even, large ones)."""
    for name, refused in _refused(program, signature):
        if not _isolated(refused):
            return name, 2, min(refused) - 1
    return None


def holes(program: Any, signature: Signature) -> tuple[int, ...]:
    """Single batch sizes excluded by conditions in the model's code (``x.shape[0] == x.shape[1]``)."""
    found = [refused for _, refused in _refused(program, signature) if _isolated(refused)]
    return tuple(sorted(set().union(*found)))


def _refused(program: Any, signature: Signature) -> Iterator[tuple[str, set[int]]]:
    """Yield (argument, excluded batch sizes) for each guard of the trace that does not hold for all sizes."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec, name in zip(signature.tensors, program.graph_signature.user_inputs, strict=True):
        if spec.batch and isinstance(name, str):
            size = placeholders[name].meta["val"].shape[0]
            for guard in size.node.shape_env.guards:
                if OF_KERNELS & {int(number) for number in guard.expr.atoms(sympy.Integer)}:
                    continue
                near = {int(number) + step for number in guard.expr.atoms(sympy.Integer) for step in (-1, 0, 1)}
                tried = {*range(3, LARGEST_CONDITION), *(rows for rows in near if rows >= 3), PROBE_ROWS}
                held = holds(guard.expr)
                refused = {rows for rows in tried if not held(rows)}
                if refused:
                    yield spec.name, refused
            return


def _isolated(refused: set[int]) -> bool:
    """Whether excluded sizes are few and not adjacent, so that all sizes around them are allowed."""
    return len(refused) <= MOST_HOLES and not any(rows + 1 in refused for rows in refused) and max(refused) < PROBE_ROWS


def lines(graph: Graph) -> list[str]:
    """List the nodes of an exported graph as text, with shapes at one number of rows: equal for equal programs."""
    found = []
    for node in graph.nodes:
        values = [abstract(value) for value in pytree.tree_leaves(node.meta.get("val"))]
        made = [shape_at(value, PROBE_ROWS) for value in values if isinstance(value, TensorValue)]
        found.append(f"{node.op} {node.target} {node.args} {node.kwargs} {made}")
    return found
