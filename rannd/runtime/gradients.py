"""Reduce gradients over the ranks that hold a parameter: DistributedDataParallel's mean over all ranks.

A parameter may be held by the replicas of one stage, or by several stages (tied weights); its gradient is the sum
over all of them, divided by the number of ranks. Gradients of one set of holders and one type travel together.
A parameter that got no gradient on any rank keeps what it had, so that optimizers skip it as they would alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rannd.runtime.parameters import Parameters
from rannd.runtime.world import World


class Reducer:
    """Moves what gathered in the aliases' gradients, reduced, to the gradients of the user's parameters."""

    def __init__(self, world: World, parameters: Parameters) -> None:
        self._world = world
        self._parameters = parameters
        buckets: dict[tuple[tuple[int, ...], torch.dtype], list[str]] = {}
        for name, tensor in parameters.tensors.items():
            if isinstance(tensor, torch.nn.Parameter):
                buckets.setdefault((parameters.slots[name], tensor.dtype), []).append(name)
        ordered = sorted(buckets, key=lambda key: (key[0], str(key[1])))
        self._buckets = [(key[0], buckets[key]) for key in ordered]
        for slots, _ in self._buckets:  # on every rank in the same order
            world.group_of(slots)

    def reduce(self) -> None:
        """Reduce all pending gradients. Collective."""
        for slots, names in self._buckets:
            if self._world.slot not in slots:
                continue
            trainable = [name for name in names if self._parameters.tensors[name].requires_grad]
            if trainable:
                self._reduce(slots, trainable)

    def clip(self, most: float) -> torch.Tensor:
        """Scale the reduced gradients so that the 2-norm over the whole model is at most `most`.

        Returns the norm before. Collective. Each parameter counts once, wherever and however often it is held.
        """
        parameters = self._parameters
        squares = torch.zeros(1, dtype=torch.float64)
        gradients = [g for name in parameters.trainable() if (g := parameters.tensors[name].grad) is not None]
        for name in parameters.trainable():
            gradient = parameters.tensors[name].grad
            if gradient is not None and parameters.slots[name][0] == self._world.slot:
                squares += gradient.detach().double().square().sum().cpu()
        norm = self._world.sum_numbers(squares).sqrt()[0]
        factor = float(most / (norm + 1e-6))
        if not factor >= 1.0:  # also where the norm is not a number, as clip_grad_norm_ does
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def _reduce(self, slots: tuple[int, ...], names: list[str]) -> None:
        group = self._world.group_of(slots)
        aliases = [self._parameters.aliases[name] for name in names]
        pending = [alias.grad for alias in aliases]
        for alias in aliases:
            alias.grad = None
        if group is None:
            for name, gradient in zip(names, pending, strict=True):
                if gradient is not None:
                    self._give(name, gradient.div_(self._world.size))
            return
        present = torch.tensor(
            [gradient is not None for gradient in pending], dtype=aliases[0].dtype, device=aliases[0].device
        )
        parts = [torch.zeros_like(a) if g is None else g for a, g in zip(aliases, pending, strict=True)]
        flat = torch.cat([present, *(part.reshape(-1) for part in parts)])
        dist.all_reduce(flat, group=group)
        sizes = [len(names), *(alias.numel() for alias in aliases)]
        counts, *reduced = torch.split(flat, sizes)
        for name, alias, gradient, count in zip(names, aliases, reduced, counts.tolist(), strict=True):
            if count:
                self._give(name, gradient.div_(self._world.size).view(alias.shape).clone())

    def _give(self, name: str, gradient: torch.Tensor) -> None:
        """Add a reduced gradient to the user's parameter, and let its hooks see it, once."""
        parameter = self._parameters.tensors[name]
        for hook in list((parameter._backward_hooks or {}).values()):
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        with torch.no_grad():
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for after in list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()):
            after(parameter)
