"""Split a rank's mini-batch into microbatches: inputs, loss weights, and gradients of outputs and inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import crossing_shape
from rannd.graph.rows.loss_weights import counted, pieces_weights
from rannd.runtime.execution.step import Step


class MiniBatch:
    """Splits the mini-batches of the rank in `slot`, on `device`; `averaged`: see Context."""

    def __init__(self, graph: ModelGraph, slot: int, device: torch.device, averaged: int) -> None:
        self._graph = graph
        self._slot = slot
        self._device = device
        self._averaged = averaged
        self._nodes = graph.traced.placeholders

    def give(self, step: Step, readers: Iterable[tuple[Node, int]]) -> None:
        """Slice the inputs into microbatches, and compute the loss weights of each, for the stages that read them."""
        readers = list(readers)
        specs, sizes = self._graph.signature.tensors, step.pieces
        counts = self._label_counts(step)
        for piece in sizes.of_slot(self._slot):
            first, rows = sizes.slices[piece]
            slices = [
                (leaf[first : first + rows] if spec.batch else leaf).detach()
                for spec, leaf in zip(specs, step.leaves, strict=True)
            ]
            weights = pieces_weights(
                self._graph.weights,
                world=self._averaged,
                rows=rows,
                rank_rows=sizes.rank_rows[self._slot],
                total_rows=sizes.total,
                counts=counts,
                device=self._device,
            )
            made = dict(zip(self._nodes, [*slices, *weights], strict=True))
            step.values.update(((piece, node, stage), made[node]) for node, stage in readers)

    def _label_counts(self, step: Step) -> dict[str, torch.Tensor]:
        """Denominators of this rank's means (e.g. numbers of non-ignored labels), over its whole mini-batch."""
        rows = step.pieces.rank_rows[self._slot]
        if rows == 0:
            return {}
        if step.whole is not None:  # this rank's share of the labels of the shared batch
            return counted(self._graph.label_counts, step.whole, rows / step.pieces.total)
        return counted(self._graph.label_counts, step.leaves)

    def counts_no_label(self, step: Step) -> torch.Tensor:
        """Whether some mean over labels has a denominator of zero, on the device."""
        found = torch.zeros((), dtype=torch.bool, device=self._device)
        for count in self._label_counts(step).values():
            found = found | (count == 0).all()
        return found

    def give_seeds(self, step: Step, gradients: Sequence[torch.Tensor | None], live: frozenset[Node]) -> None:
        """Split the gradients of the rank's outputs into microbatches, as seeds of their backwards."""
        sizes, pieces = step.pieces, step.pieces.of_slot(self._slot)
        for node, result, gradient in zip(self._graph.traced.results, self._graph.results, gradients, strict=True):
            if node not in live or not result.is_sent:
                continue
            for piece in pieces:
                first, rows = sizes.slices[piece]
                shape = crossing_shape(node, rows)
                if gradient is None or (result.kind == "first" and piece != pieces[0]):
                    seed = torch.zeros(shape, dtype=node.meta["val"].dtype, device=self._device)
                elif result.kind == "rows" and len(pieces) > 1:
                    inner = shape[result.dim] // rows
                    seed = gradient.narrow(result.dim, first * inner, rows * inner)
                else:
                    seed = gradient
                step.add(piece, node, seed.to(self._device))

    def input_gradients(self, step: Step, live: frozenset[Node]) -> list[torch.Tensor | None]:
        """Combine the gradients of the rank's inputs over its microbatches; None for inputs without gradient."""
        pieces = step.pieces.of_slot(self._slot)
        found: list[torch.Tensor | None] = []
        for node, spec, leaf in zip(self._nodes, self._graph.signature.tensors, step.leaves, strict=False):
            if node not in live:
                found.append(None)
                continue
            parts = [step.gradients[piece, node] for piece in pieces if (piece, node) in step.gradients]
            if not parts:
                found.append(torch.zeros_like(leaf))
            else:
                found.append(torch.cat(parts) if spec.batch else torch.stack(parts).sum(0))
        return found
