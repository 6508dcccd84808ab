"""Assemble the outputs of a call from those of its microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from rannd.errors import StepError
from rannd.graph.fx.sizes import number_at
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import crossing_shape
from rannd.graph.rows.loss_weights import Result
from rannd.runtime.parameters.valueless import Valueless

Made = Mapping[tuple[int, Node, int], torch.Tensor]
"""Values by (microbatch, node, reader), see Step.values."""


class NotSent(Valueless, torch.Tensor):  # type: ignore[misc]
    """Placeholder for an output that stayed on the rank that computed it; any use of its values raises StepError."""

    _told: str

    @staticmethod
    def of(node: Node, rows: int, place: str) -> NotSent:
        """Create the placeholder of the output `node` for `rows` rows; `place` is its name in messages."""
        shape, dtype = crossing_shape(node, rows), node.meta["val"].dtype
        found: NotSent = torch.Tensor._make_wrapper_subclass(NotSent, shape, dtype=dtype)
        found._told = (
            f"{place} of the model, {dtype} {tuple(shape)}, was not sent to this rank: in training, large outputs "
            'besides the loss stay where they are computed. Wrap the model with RaNNCModule(..., outputs="all") to '
            'have them sent (with Lightning: RaNNCStrategy(outputs="all")), or read them in eval mode'
        )
        return found

    @staticmethod
    def like(other: NotSent, shape: tuple[int, ...]) -> NotSent:
        """Copy of `other` with another shape."""
        found: NotSent = torch.Tensor._make_wrapper_subclass(NotSent, shape, dtype=other.dtype)
        found._told = other._told
        return found

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NotSent({self._told})"

    def refusal(self, what: str) -> Exception:
        """See `Valueless`."""
        return StepError(self._told)


def join(
    graph: ModelGraph,
    made: Made,
    outside: int,
    pieces: Sequence[int],
    rows: int,
    missing: frozenset[Node],
    device: torch.device,
    *,
    shared: bool,
) -> list[Any]:
    """Outputs of a rank whose mini-batch has `rows` rows in microbatches `pieces`; None for globally summed ones.

    Also None on a rank without rows if the batch is `shared`. `outside`: stands for the ranks as readers of values.
    """
    outputs: list[Any] = []
    for place, (node, result) in enumerate(zip(graph.traced.results, graph.results, strict=True)):
        if result.kind == "number":
            outputs.append(number_at(node.meta["val"], rows))
        elif result.kind == "global" or (shared and not pieces):
            outputs.append(None)
        elif node in missing:
            outputs.append(NotSent.of(node, rows, f"output {graph.traced.outputs.positions[place]}"))
        else:
            outputs.append(_joined(node, result, [made[piece, node, outside] for piece in pieces], device))
    return outputs


def _joined(node: Node, result: Result, found: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not found and result.kind == "sum":
        return torch.zeros(crossing_shape(node, 0), dtype=node.meta["val"].dtype, device=device)
    if not found:
        return _empty(node, device)
    if result.kind == "rows" and len(found) > 1:
        return torch.cat(found, result.dim)
    if result.kind == "sum":
        return torch.stack(found).sum(0)
    return found[0]


def _empty(node: Node, device: torch.device) -> torch.Tensor:
    """Empty output of a rank without rows; StepError if its shape cannot be empty."""
    shape = crossing_shape(node, 0)
    if 0 not in shape:
        raise StepError(
            f"this rank's mini-batch is empty, and the model's output {node.name} of shape {shape} cannot be empty; "
            "give every rank at least one sample"
        )
    return torch.empty(shape, dtype=node.meta["val"].dtype, device=device)
