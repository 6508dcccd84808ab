"""All-reduce of scalar outputs such as losses, which are sums over the microbatches of all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import crossing_shape
from rannd.runtime.comm.lockstep import pack_floats, unpack_floats
from rannd.runtime.comm.world import World
from rannd.runtime.execution.step import Step


class Totals:
    """Sums the "global" outputs of a graph; `averaged`: see Executor."""

    def __init__(self, world: World, graph: ModelGraph, averaged: int) -> None:
        self._world = world
        self._averaged = averaged
        self.nodes = [
            node for node, result in zip(graph.traced.results, graph.results, strict=True) if result.kind == "global"
        ]
        self._lengths = [_length(node) for node in self.nodes]

    def take(self, step: Step, piece: int) -> None:
        """Add the values of a microbatch to this rank's partial sums."""
        for node in self.nodes:
            if (piece, node) in step.values:
                value = step.values.pop((piece, node))
                value = value.to(torch.complex128 if value.is_complex() else torch.float64)
                step.sums[node] = step.sums[node] + value if node in step.sums else value

    def begin(self, step: Step) -> None:
        """Start the asynchronous all-reduce of this rank's partial sums. Collective."""
        if self.nodes:
            flat = [
                _flat(step.sums[node]) if node in step.sums else torch.zeros(length, dtype=torch.float64)
                for node, length in zip(self.nodes, self._lengths, strict=True)
            ]
            step.total = self._world.begin_sum(torch.cat(flat))
            step.sums.clear()

    def finish(self, step: Step) -> dict[Node, torch.Tensor]:
        """Wait for the all-reduce started by `begin` and return the totals on the device."""
        if step.total is None:
            return {}
        added, step.total = step.total.finish() / self._averaged, None
        return self._shaped(added)

    def packed(self, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        """Pack the gradients of the totals into integers, with 0.0 for None."""
        numbers: list[float] = []
        for gradient, length in zip(gradients, self._lengths, strict=True):
            numbers += _flat(gradient).tolist() if gradient is not None else [0.0] * length
        return pack_floats(numbers)

    def unpacked(self, numbers: Sequence[int]) -> dict[Node, torch.Tensor]:
        """Unpack the result of `packed`."""
        return self._shaped(torch.tensor(unpack_floats(numbers), dtype=torch.float64))

    def _shaped(self, flat: torch.Tensor) -> dict[Node, torch.Tensor]:
        parts = zip(self.nodes, flat.split(self._lengths), strict=True)
        return {node: _shaped(part, node, self._world.device) for node, part in parts}


def _flat(value: torch.Tensor) -> torch.Tensor:
    """Flatten a value to float64 on the CPU; complex numbers become pairs."""
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.detach().reshape(-1).to("cpu", torch.float64)


def _shaped(flat: torch.Tensor, node: Node, device: torch.device) -> torch.Tensor:
    """Inverse of `_flat` for the output `node`."""
    shape, dtype = crossing_shape(node, 1), node.meta["val"].dtype
    if dtype.is_complex:
        return torch.view_as_complex(flat.reshape(*shape, 2)).to(device, dtype)
    return flat.reshape(shape).to(device, dtype)


def _length(node: Node) -> int:
    """Number of float64 elements of `_flat` for the output `node`."""
    numbers = math.prod(crossing_shape(node, 1))
    return 2 * numbers if node.meta["val"].dtype.is_complex else numbers
