"""One call of the model, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from rannd.runtime.comm.world import Sum
from rannd.runtime.execution.microbatches import Pieces
from rannd.runtime.gradients.reducer import Gathered

Key = tuple[int, Node]
"""A piece, and a value of it."""


@dataclass
class Saved:
    """What the backward of a piece needs."""

    inputs: dict[Node, torch.Tensor]
    outputs: dict[Node, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    """Buffers as they were before the step, where the forward has to run again."""


@dataclass
class Step:
    """What is known of a call until its backward is done."""

    number: int
    pieces: Pieces
    leaves: Sequence[torch.Tensor]
    """This rank's tensors, on its device."""
    whole: Sequence[torch.Tensor] | None = None
    """The tensors of rank 0, where its mini-batch is shared by all."""
    interleaved: bool = False
    """Backward runs inside the forward call."""
    seed: float = 1.0
    """Gradient of the loss that backward began with."""
    keep: bool = False
    """Backward may run again."""
    finished: bool = False
    values: dict[Key, torch.Tensor] = field(default_factory=dict)
    sums: dict[Node, torch.Tensor] = field(default_factory=dict)
    """Outputs that all ranks add up: the sums over the pieces that were computed here."""
    total: Sum | None = None
    """Their sums over the ranks, which are under way."""
    saved: dict[int, Saved] = field(default_factory=dict)
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Gradients that have come for values of this rank's stage, or for its inputs."""
    outgoing: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Gradients of what came in from other stages."""
    upstream: dict[Node, list[torch.Tensor]] = field(default_factory=dict)
    """Gradients of outputs that all ranks add up, as each slot's rank gave them."""
    borrowed: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Message buffers that each piece uses."""
    gathered: Gathered | None = None
    """Gradients of parameters from a backward inside the forward call."""
    input_gradients: list[torch.Tensor | None] = field(default_factory=list)
    """The same of this rank's inputs."""

    def add(self, piece: int, node: Node, gradient: torch.Tensor) -> None:
        """Add to the gradient of a piece's value."""
        key = (piece, node)
        self.gradients[key] = self.gradients[key] + gradient if key in self.gradients else gradient
