"""Find out that a stage's gradients were clipped alone, between their reduction and the optimizer's step.

A script that computes a norm of its own over the parameters that it sees, and scales by it, scales every stage by
another factor. So a few elements of a few gradients are kept when they are reduced, and looked at again when the
optimizer steps: where all have changed by one factor, that is the rank's. Ranks compare their factors in the next
call of the model, not in the step: not all of them need to step (a stage may have no parameters), but all call.

    backward, reduced     optimizer.step               next call
    keep a sample    ──►  sample / kept = factor  ──►  all ranks: 1, 1, 0.31  ──►  warn once

A sample costs some 0.1 ms and a comparison one small all_gather, in the first steps and in every 16th.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from rannd import log
from rannd.plan.deployment import Deployment
from rannd.runtime.comm.lockstep import pack_floats, unpack_floats
from rannd.runtime.comm.world import World
from rannd.runtime.parameters.ownership import Parameters

FIRST = 16
"""Calls in which ranks compare, and the distance of later ones."""
PARAMETERS, ELEMENTS = 4, 4
"""Gradients that are looked at, and elements of each."""
UNIFORM = 0.02
"""Relative difference up to which elements have changed by one factor: half precision rounds."""
DIFFERENT = 0.05
"""Relative difference from which factors of ranks differ."""
_UNKNOWN = -1.0


class ClipWatch:
    """Watches the gradients of one deployed model with one optimizer."""

    def __init__(
        self, world: World, parameters: Parameters, deployment: Deployment, optimizer: torch.optim.Optimizer
    ) -> None:
        self._world = world
        self._parameters = parameters
        self._stages = {rank: stage.name for stage in deployment.stages for rank in _ranks(world, stage.slots)}
        self._kept: tuple[list[str], torch.Tensor] | None = None
        self._factor = _UNKNOWN
        self._done = len(deployment.stages) < 2
        itself = weakref.ref(self)

        def before(*_: Any) -> None:
            watch = itself()
            if watch is not None:
                watch.stepping()

        self._handle = optimizer.register_step_pre_hook(before)

    def reduced(self) -> None:
        """Gradients have just been reduced."""
        if self._done or self._factor != _UNKNOWN:  # not compared yet
            return
        names = [name for name in self._parameters.trainable() if _dense(self._parameters.tensors[name].grad)]
        names = names[:: max(len(names) // PARAMETERS, 1)][:PARAMETERS]
        sample = self._sample(names)
        self._kept = (names, sample) if sample is not None else None

    def stepping(self) -> None:
        """The optimizer is about to step."""
        if self._done or self._kept is None:
            return
        (names, before), self._kept = self._kept, None
        after = self._sample(names)
        if after is None or after.shape != before.shape:
            return
        usable = before.isfinite() & after.isfinite() & (before != 0)
        ratios = (after[usable] / before[usable]).tolist()
        if len(ratios) < 2:
            return
        low, high = min(ratios), max(ratios)
        if low > 0 and high - low <= UNIFORM * high:
            self._factor = sorted(ratios)[len(ratios) // 2]

    def compare(self, call: int) -> None:
        """In a call of the model: what the last step showed. Collective, with the same number on all ranks."""
        if self._done or (call > FIRST and call % FIRST):
            return
        mine = pack_floats([self._factor])
        self._factor = _UNKNOWN
        factors = [unpack_floats(row)[0] for row in self._world.gather_numbers(mine)]
        known = [factor for factor in factors if factor != _UNKNOWN]
        if not known or max(known) - min(known) <= DIFFERENT * max(known):
            return
        self._done = True
        if self._world.rank == 0:
            self._warn(factors)

    def close(self) -> None:
        """Stop watching."""
        self._done = True
        self._handle.remove()

    def _sample(self, names: Sequence[str]) -> torch.Tensor | None:
        """Some elements of the gradients of some parameters; None where one has no gradient any more."""
        parts = []
        for name in names:
            gradient = self._parameters.tensors[name].grad
            if gradient is None or not _dense(gradient):
                return None
            flat = gradient.detach().reshape(-1)
            parts.append(flat[:: max(flat.numel() // ELEMENTS, 1)][:ELEMENTS].double())
        return torch.cat(parts).cpu() if parts else None

    def _warn(self, factors: Sequence[float]) -> None:
        by_stage = {self._stages[rank]: factor for rank, factor in enumerate(factors) if factor != _UNKNOWN}
        told = ", ".join(f"stage {stage} by {factor:.4g}" for stage, factor in by_stage.items())
        log.get("RaNNCModule").warning(
            "Between their reduction and optimizer.step gradients were scaled differently: %s. A norm over the "
            "parameters that one rank holds is that of its stage alone: clip with model.clip_grad_norm(x) or "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), x), which take the norm over the whole model",
            told,
        )


def _dense(gradient: torch.Tensor | None) -> bool:
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and gradient.numel() > 0
        and gradient.is_floating_point()
    )


def _ranks(world: World, slots: Sequence[int]) -> list[int]:
    return [world.rank_of_slot[slot] for slot in slots]
