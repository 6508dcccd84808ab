"""State of one step: a call of the model, from its forward to its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from rannd.device.generators import OtherStates, States
from rannd.graph.weight_gradients.weight_queue import WeightQueue
from rannd.runtime.audit.step_audit import StepAudit
from rannd.runtime.binding.microbatches import Pieces
from rannd.runtime.comm.world import Sum
from rannd.runtime.gradients.reducer import Gathered
from rannd.runtime.gradients.scaling import Factor

Key = tuple[int, Node]
"""(microbatch, node) of a value."""
Given = tuple[int, Node, int]
"""(microbatch, node, reader) of a value on its way to the stage that reads it; the number of stages: to its rank."""


@dataclass
class Saved:
    """Tensors saved for the backward of a microbatch through a segment."""

    inputs: dict[Node, torch.Tensor]
    """Those that get a gradient; all, if its forward is recomputed."""
    outputs: dict[Node, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    """Buffers before the segment, if its forward is recomputed."""
    away: frozenset[Node] = frozenset()
    """Those of `inputs` that are elsewhere (`offload_activations`)."""
    random: States | None = None
    """Where its random numbers begin; None: those of the stage."""
    other: OtherStates | None = None
    """Where those of Python and numpy began, if its forward is recomputed and may draw of them."""
    first: Mapping[Node, torch.Tensor] | None = None
    """What its forward has computed, if that is compared with what is recomputed (`verify_recomp`)."""


@dataclass
class Step:
    """State of a call until its backward is done."""

    number: int
    pieces: Pieces
    leaves: Sequence[torch.Tensor]
    """This rank's tensors, on its device."""
    whole: Sequence[torch.Tensor] | None = None
    """Rank 0's tensors, if its mini-batch is shared by all ranks."""
    interleaved: bool = False
    """Whether backward runs inside the forward call (1F1B)."""
    seed: Factor = 1.0
    """Gradient of the loss that an interleaved backward starts with."""
    keep: bool = False
    """Whether backward may run again (retain_graph)."""
    finished: bool = False
    audit: StepAudit | None = None
    """Keeps values of the step, if it is audited."""
    values: dict[Given, torch.Tensor] = field(default_factory=dict)
    """Whoever reads or sends one takes it."""
    sums: dict[int, torch.Tensor] = field(default_factory=dict)
    """Scalar outputs summed over all ranks, by their place among these: this rank's partial sums over microbatches."""
    total: Sum | torch.Tensor | None = None
    """All-reduce of these sums: asynchronous, or on the device."""
    saved: dict[tuple[int, int], list[Saved]] = field(default_factory=dict)
    """By microbatch and stage, those of all segments of the stage."""
    delayed: dict[tuple[int, int], list[WeightQueue]] = field(default_factory=dict)
    """By microbatch and stage, gradients of parameters that wait for the second half of its backward, segment by
    segment."""
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Gradients of outputs of this rank's stages, or of its inputs: sums over the stages that read the value."""
    outgoing: dict[Given, torch.Tensor] = field(default_factory=dict)
    """Gradients of values that came from other ranks, each with the stage that has read it."""
    upstream: dict[Node, list[torch.Tensor]] = field(default_factory=dict)
    """Gradients of globally summed outputs, from the rank in each slot."""
    borrowed: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    """Message buffers in use by each microbatch in each stage."""
    gathered: Gathered | None = None
    """Gradients of parameters from a backward inside the forward call."""
    input_gradients: list[torch.Tensor | None] = field(default_factory=list)
    """Gradients of this rank's inputs from a backward inside the forward call."""

    def add(self, piece: int, node: Node, gradient: torch.Tensor) -> None:
        """Accumulate the gradient of a microbatch's value."""
        key = (piece, node)
        self.gradients[key] = self.gradients[key] + gradient if key in self.gradients else gradient
