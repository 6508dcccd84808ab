"""Computes one block for one microbatch, from given values, parameters and buffers, as the runtime does it eagerly.

A block is a segment of a stage: operators that run one after the other, forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from rannd.device.generators import States, seeded
from rannd.graph.call.signature import Mode
from rannd.runtime.binding.bound_graph import BoundStage, Segment


@dataclass(frozen=True)
class ReplayBlock:
    """A segment of a stage."""

    stage: BoundStage
    number: int
    """Of the segment in its stage."""

    @property
    def segment(self) -> Segment:
        return self.stage.segments[self.number]

    @property
    def key(self) -> tuple[int, int]:
        return self.stage.number, self.number

    def __str__(self) -> str:
        inside = [node for node in self.segment.part.module.graph.nodes if node.meta.get("module")]
        modules = list(dict.fromkeys(str(node.meta["module"]) for node in inside))
        held = f": {modules[0]}" + (f" to {modules[-1]}" if len(modules) > 1 else "") if modules else ""
        return f"block {self.stage.number}.{self.number} (stage {self.stage.number}, segment {self.number}{held})"


@dataclass
class BlockTensors:
    """What a block computes with in each microbatch, on the device."""

    tensors: list[torch.Tensor]
    """Parameters, buffers and constants, in the order of `Part.tensors`; gradients accumulate in their `grad`."""
    buffers: Mapping[str, torch.Tensor]
    """Those that the stage writes, as before the step: every microbatch starts with them."""


@dataclass
class Replay:
    """The run of a block on a microbatch; `backward` may follow."""

    inputs: dict[Node, torch.Tensor]
    outputs: dict[Node, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    """Those that the stage writes, afterwards."""
    after: States | None
    """Where the random numbers of the next block of the stage begin."""

    def backward(self, seeds: Mapping[Node, torch.Tensor]) -> dict[Node, torch.Tensor | None]:
        """Gradients of the inputs from those of outputs; those of parameters accumulate."""
        roots = [node for node in seeds if self.outputs[node].requires_grad]
        if roots:
            values = [self.outputs[node] for node in roots]
            torch.autograd.backward(values, [seeds[node] for node in roots])
        return {node: value.grad for node, value in self.inputs.items()}


def replay(
    block: ReplayBlock,
    mode: Mode,
    rows: int,
    inputs: dict[Node, torch.Tensor],
    given: BlockTensors,
    begin: int | States,
    device: torch.device,
) -> Replay:
    """Run a block's forward on a microbatch of `rows` rows; random numbers begin at `begin`, a seed or states."""
    part = block.segment.part
    buffers = {name: each.clone() for name, each in given.buffers.items()}
    tensors = [buffers.get(name, each) for name, each in zip(part.tensors, given.tensors, strict=True)]
    states: States | None = None if isinstance(begin, int) else begin
    drawing = seeded(device, begin) if part.random else contextlib.nullcontext(states)
    with torch.enable_grad(), mode.autocasting(), drawing as after:
        # What the block writes in place must be no leaf of autograd's.
        copies = [each.clone() if each.requires_grad else each for each in inputs.values()]
        values = part.module(*copies, *tensors, *part.numbers_at(rows))
    outputs = dict(zip(part.outputs, values, strict=True))
    return Replay(inputs, outputs, buffers, after)
