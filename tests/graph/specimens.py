"""Models of the zoo with their graphs, compared with themselves."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from pieces import Outcome, assert_same, graph_of
from stages import buffers_kept, parts_of, run_eager, run_stages
from torch import Tensor, nn
from torch.fx import Node
from zoo import Batch, Entry

from rannd.graph.model import ModelGraph
from rannd.graph.modules.methods import part_of

TRACED_ROWS = 4
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
PARTLY_SINGLE = {"gpt-j": 1e-5}
"""Double models that compute something in single precision, which is rounded as values lie in memory."""


@dataclass(frozen=True)
class Specimen:
    """A model of the zoo with its graph."""

    entry: Entry
    model: nn.Module
    graph: ModelGraph

    @property
    def share_in_leaves(self) -> float:
        """Share of the model's parameters that leaves hold."""
        paths = self.graph.traced.leaf_paths
        inside = {p: p.numel() for path in paths for p in part_of(self.model, path).parameters()}
        return sum(inside.values()) / sum(p.numel() for p in self.model.parameters())

    def compare(self, batch: Batch, *stagings: Mapping[Node, int]) -> None:
        """The graph, cut in the ways of `stagings`, gives the outputs, gradients and buffers of the model."""
        tensors = [leaf for leaf in pytree.tree_leaves(dict(sorted(batch.items()))) if isinstance(leaf, Tensor)]
        within = max(TOLERANCE[self.entry.dtype], PARTLY_SINGLE.get(self.entry.name, 0))
        with buffers_kept(self.model) as expected_buffers:
            expected = self._seeded(0, run_eager, tensors)
        for number, staging in enumerate(stagings, 1):
            with buffers_kept(self.model) as buffers:
                found = self._seeded(number, run_stages, parts_of(self.graph, staging), tensors)
            assert_same(found, expected, within=within)
            assert buffers.keys() == expected_buffers.keys()
            for name, buffer in buffers.items():
                torch.testing.assert_close(
                    buffer, expected_buffers[name], rtol=within, atol=within / 10, msg=lambda m, n=name: f"{n}: {m}"
                )

    def _seeded(self, run_number: int, run: Any, *args: Any) -> Outcome:
        """Models that draw random numbers draw the same ones in every run; all others need not be told."""
        seeded(0 if self.entry.random else run_number)
        outcome: Outcome = run(self.graph, self.model, *args)
        return outcome


def seeded(seed: int) -> None:
    """Start all generators of random numbers anew."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def specimen_of(entry: Entry) -> Specimen:
    """Build and trace a model of the zoo."""
    with entry.precision():
        torch.manual_seed(11)
        model = entry.build()
        return Specimen(entry, model, graph_of(model, **entry.batch(TRACED_ROWS)))
