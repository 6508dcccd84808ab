"""What one rank keeps of a step that is audited: copies on the CPU, by what they are and where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch.fx import Graph, Node

from rannd.runtime.parameters.absent import part_of
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.zero.tensor_piece import TensorPiece

Key: TypeAlias = tuple[str | int, ...]
"""A kind of values, and where they are: numbers of stage, microbatch and segment, or the name of a tensor."""


class StepRecord:
    """Values of one rank in one step.

    =================== ========================= ===================================================================
    kind                where                     what
    =================== ========================= ===================================================================
    leaf, whole         place                     a tensor of this rank's mini-batch; rank 0: of one that all share
    entered             stage, piece              values that a stage reads, as they have arrived
    made                stage, piece, segment     values that a segment has computed
    before, after       stage                     buffers that a stage writes, before and after the call
    outputs                                       what the call returns on this rank
    given                                         gradients of these outputs
    seeds, found        stage, piece, segment     gradients that the backward of a segment starts from, and gives
    left                stage, piece              gradients that a stage gives for what it reads
    local, reduced      name                      gradient of a parameter before and after its reduction
    grad before, after  name                      ``parameter.grad`` before and after backward
    piece               name                      which elements of it this rank has (ZeRO 2 and 3)
    input gradients                               gradients of this rank's tensors
    tensor              name                      a parameter or buffer, of now; with "start", this rank's elements
    =================== ========================= ===================================================================
    """

    def __init__(self, graph: Graph, parameters: Parameters) -> None:
        self.label: dict[Node, str] = {node: str(number) for number, node in enumerate(graph.nodes)}
        """Name of a node, the same on all ranks."""
        self.used: dict[str, torch.Tensor] = {}
        """The tensors that this rank's stages have computed with, not copied."""
        self._parameters = parameters
        self._kept: dict[Key, dict[str, torch.Tensor]] = {}
        self._closed = False

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def clear(self) -> None:
        """Let go of all copies; nothing more is kept."""
        self._closed = True
        self._kept.clear()
        self.used.clear()

    def values(self, *key: str | int, **by_kind: Mapping[Node, torch.Tensor | None]) -> None:
        """Keep values of nodes, by kind."""
        for kind, values in by_kind.items():
            self.named(kind, *key, tensors={self.label[node]: each for node, each in values.items()})

    def named(self, *key: str | int, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Keep tensors by name; those that are None are left out."""
        if not self._closed:
            self._kept[key] = {name: _copied(each) for name, each in tensors.items() if each is not None}

    def gradients(self, kind: str, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Keep one gradient of each parameter."""
        for name, gradient in gradients.items():
            if gradient is not None:
                if isinstance(gradient, TensorPiece):
                    part = gradient.piece
                    self.named("piece", name, tensors={"": torch.tensor([part.start, part.stop])})
                    gradient = gradient.flat
                self.named(kind, name, tensors={"": gradient})

    def find(self, key: Key) -> dict[str, torch.Tensor]:
        """What was kept under a key; nothing if nothing was."""
        if key[0] != "tensor":
            return self._kept.get(key, {})
        tensor = self.tensor(str(key[1]))
        part = part_of(tensor)
        if isinstance(part, TensorPiece):
            return {"": _copied(part.flat), "start": torch.tensor(part.piece.start)}
        return {"": _copied(tensor)}

    def tensor(self, name: str) -> torch.Tensor:
        """The user's parameter or buffer, or what this rank was lent."""
        return self._parameters.tensors[name] if name in self._parameters.own else self.used[name]

    def uses(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Note the tensors that a stage computes with; not those that are gathered for a moment (ZeRO 3)."""
        if not self._closed:
            here = zip(names, tensors, strict=True)
            self.used.update((name, each) for name, each in here if name not in self._parameters.sharded)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    plain = plain if plain.layout is torch.strided else plain.to_dense()
    return plain.resolve_conj().resolve_neg().to("cpu", copy=True).contiguous()
