"""Synchronizes `requires_grad` of parameters over all ranks.

`for p in model.parameters(): p.requires_grad_(False)` changes only the parameters that a rank holds, but a graph is
traced with those of all ranks. The flag on the rank that holds the parameter is decisive.
"""

from __future__ import annotations

import torch

from rannd.runtime.comm.world import World
from rannd.runtime.parameters.ownership import Parameters


class Frozen:
    """The `requires_grad` flags of one deployed model."""

    def __init__(self, world: World, parameters: Parameters) -> None:
        self._world = world
        self._parameters = parameters
        self._names = [name for name, each in parameters.tensors.items() if isinstance(each, torch.nn.Parameter)]
        self._own = [parameters.tensors[name] for name in parameters.own if name in set(self._names)]
        self._known = self._flags()

    def _flags(self) -> list[bool]:
        return [tensor.requires_grad for tensor in self._own]

    def changed(self) -> bool:
        """Whether a flag has changed on this rank since the last `agree`."""
        return self._flags() != self._known

    def agree(self) -> None:
        """Copy the flags from the ranks that hold the parameters to all ranks. Collective."""
        if self._world.size > 1:
            mine = bytes(self._parameters.tensors[name].requires_grad for name in self._names)
            told = self._world.gather_bytes(mine)
            for place, name in enumerate(self._names):
                holder = self._world.rank_of_slot[self._parameters.slots[name][0]]
                self._parameters.tensors[name].requires_grad_(bool(told[holder][place]))
        self._known = self._flags()
