"""Parameters, buffers and constants that this rank's stages read: its own, and those that other ranks lend it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rannd.runtime.binding.bound_graph import BoundGraph
from rannd.runtime.comm.world import World
from rannd.runtime.transport.transport import as_bytes
from rannd.runtime.zero.sharded_parameters import ShardedParameters


class SlotTensors:
    """Tensors of a bound graph on this rank; `held`: those that it holds, by name.

    `values`: what replicas share of the parameters' values.
    """

    def __init__(
        self, world: World, bound: BoundGraph, held: Mapping[str, torch.Tensor], values: ShardedParameters | None
    ) -> None:
        self.held = held
        self._world = world
        self._bound = bound
        self._values = values
        self._loans: dict[str, torch.Tensor] = {}

    def find(self, names: Iterable[str], constants: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of these names that a stage with these constants reads."""
        loans, held = self._loans, self.held
        return [
            loans[name] if name in loans else constants[name] if name in constants else held[name] for name in names
        ]

    def lend(self) -> None:
        """Send tensors to the ranks that read but do not hold them. Called at the beginning of a call."""
        world, slot, transport = self._world, self._bound.slot, self._world.transport
        layout = self._bound.layout
        for name, (lender, borrowers) in self._bound.borrowed.items():
            if self._values is not None and slot in layout.stages[layout.stages_of(lender)[0]]:
                self._values.enter(*self._values.readers([[name]]))
            if slot == lender:
                message = as_bytes(self.held[name].detach())
                sent = [transport.send(message, world.rank_of_slot[each], gradients=False) for each in borrowers]
                for each in sent:
                    transport.settle(each)
            elif slot in borrowers:
                like = self._bound.graph.traced.named(name)
                buffer = transport.empty(like.numel() * like.dtype.itemsize)
                transport.take(transport.post(buffer, world.rank_of_slot[lender], gradients=False))
                self._loans[name] = buffer.view(like.dtype).view(like.shape)
