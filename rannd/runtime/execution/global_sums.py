"""All-reduce of scalar outputs such as losses, which are sums over the microbatches of all ranks.

Where values of the device are read late, the sums stay on it: all ranks' parts are gathered there, after everything
else that the step transfers. On CPUs they are gathered by the host, while the last backward runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from rannd.device.reads import read
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import crossing_shape
from rannd.runtime.comm.lockstep import pack_floats, unpack_floats
from rannd.runtime.comm.world import World
from rannd.runtime.execution.step import Step


class Totals:
    """Sums the "global" outputs of a graph; `averaged`: see Context. `outside`: see Step.values."""

    def __init__(self, world: World, graph: ModelGraph, averaged: int, outside: int) -> None:
        self._world = world
        self._outside = outside
        self._averaged = averaged
        self._late = world.reads.late
        self.nodes = [
            node for node, result in zip(graph.traced.results, graph.results, strict=True) if result.kind == "global"
        ]
        self.lengths = [_length(node) for node in self.nodes]
        """Numbers of each."""

    def take(self, step: Step, piece: int) -> None:
        """Add the values of a microbatch to this rank's partial sums."""
        for place, node in enumerate(self.nodes):
            value = step.values.pop((piece, node, self._outside), None)
            if value is not None:
                value = value.to(torch.complex128 if value.is_complex() else torch.float64)
                step.sums[place] = step.sums[place] + value if place in step.sums else value

    def begin(self, step: Step) -> None:
        """Start the asynchronous all-reduce of this rank's partial sums. Collective."""
        if self.nodes:
            flat = self._flat([step.sums.get(place) for place in range(len(self.nodes))])
            if self._late:
                step.total = self._world.share_values(flat).sum(0)
            else:
                step.total = self._world.begin_sum(flat)
            step.sums.clear()

    def finish(self, step: Step) -> dict[Node, torch.Tensor]:
        """Wait for the all-reduce started by `begin` and return the totals on the device."""
        if step.total is None:
            return {}
        total, step.total = step.total, None
        flat = (total if isinstance(total, torch.Tensor) else total.finish()) / self._averaged
        return dict(zip(self.nodes, self._shaped(flat), strict=True))

    def packed(self, gradients: Sequence[torch.Tensor | None]) -> list[int]:
        """Pack the gradients of the totals into integers, with 0.0 for None; none where values are read late."""
        return [] if self._late or not self.nodes else pack_floats(self._flat(gradients).tolist())

    def upstream(
        self, gradients: Sequence[torch.Tensor | None], packed: Sequence[Sequence[int]]
    ) -> list[list[torch.Tensor]]:
        """Gradients of the totals of each rank, from this rank's and from what `packed` made of them on all ranks.

        Collective where values are read late.
        """
        if not self.nodes:
            return [[] for _ in packed]
        if self._late:
            return [self._shaped(each) for each in self._world.share_values(self._flat(gradients))]
        return [self._shaped(torch.tensor(unpack_floats(each), dtype=torch.float64)) for each in packed]

    def _flat(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Values of the totals' nodes as one float64 tensor, with zeros for None; complex numbers become pairs.

        It is on the device where values are read late, else on the CPU.
        """
        device = self._world.device if self._late else torch.device("cpu")
        parts = []
        for value, length in zip(values, self.lengths, strict=True):
            if value is None:
                parts.append(torch.zeros(length, dtype=torch.float64, device=device))
                continue
            real = torch.view_as_real(value) if value.is_complex() else value
            parts.append((real if self._late else read(real)).detach().reshape(-1).to(device, torch.float64))
        return torch.cat(parts)

    def _shaped(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(self.nodes, flat.split(self.lengths), strict=True)
        return [_shaped(part, node, self._world.device) for node, part in parts]


def _shaped(flat: torch.Tensor, node: Node, device: torch.device) -> torch.Tensor:
    """Inverse of `Totals._flat` for the output `node`."""
    shape, dtype = crossing_shape(node, 1), node.meta["val"].dtype
    if dtype.is_complex:
        return torch.view_as_complex(flat.reshape(*shape, 2)).to(device, dtype)
    return flat.reshape(shape).to(device, dtype)


def _length(node: Node) -> int:
    """Number of float64 elements of `Totals._flat` for the output `node`."""
    numbers = math.prod(crossing_shape(node, 1))
    return 2 * numbers if node.meta["val"].dtype.is_complex else numbers
