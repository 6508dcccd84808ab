"""Warns if stages scale their gradients by different factors, between their reduction and the optimizer's step.

This happens in a script that clips gradients by a norm that it computes itself over the parameters of its own rank.
A few elements of a few gradients are sampled after the reduction and again when the optimizer steps: if all have
changed by the same factor, that is the rank's factor. Ranks compare their factors in the next call of the model, not in
the step, because not all of them need to step (a stage may have no parameters), but all of them call the model.

    backward, reduced     optimizer.step               next call (where values are read late, the one after it)
    keep a sample    ──►  sample / kept = factor  ──►  all ranks: 1, 1, 0.31  ──►  warn once

A sample takes about 0.1 ms and a comparison is one small all_gather; they run in the first 16 steps and then in every
16th.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from rannd import log
from rannd.plan.deployment import Deployment
from rannd.plan.plan_text import holders, stage_label
from rannd.runtime.comm.lockstep import pack_floats, unpack_floats
from rannd.runtime.comm.world import World
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.zero.tensor_piece import flat_part

FIRST = 16
"""Number of first calls in which ranks compare, and the interval of later comparisons."""
PARAMETERS, ELEMENTS = 4, 4
"""Number of sampled gradients, and of sampled elements of each."""
UNIFORM = 0.02
"""Relative difference up to which ratios of elements count as the same factor, because half precision rounds."""
DIFFERENT = 0.05
"""Relative difference from which the factors of ranks count as different."""
_UNKNOWN = -1.0


class ClipWatch:
    """Detects different scaling of the gradients of one deployed model with one optimizer."""

    def __init__(
        self, world: World, parameters: Parameters, deployment: Deployment, optimizer: torch.optim.Optimizer
    ) -> None:
        self._world = world
        self._parameters = parameters
        labels: dict[int, list[str]] = {}
        for stage in deployment.stages:
            for slot in stage.slots:
                label = f"{stage_label(deployment, stage)} ({holders(stage, world.rank_of_slot)})"
                labels.setdefault(world.rank_of_slot[slot], []).append(label)
        self._stages = {rank: " and ".join(each) for rank, each in labels.items()}
        """What each rank runs, for messages."""
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
        """Sample the gradients after their reduction."""
        if self._done or self._factor != _UNKNOWN:  # the last factor was not compared yet
            return
        names = [name for name in self._parameters.trainable() if _dense(self._parameters.tensors[name].grad)]
        names = names[:: max(len(names) // PARAMETERS, 1)][:PARAMETERS]
        sample = self._sample(names)
        self._kept = (names, sample) if sample is not None else None

    def stepping(self) -> None:
        """Compute this rank's factor before the optimizer's step."""
        if self._done or self._kept is None:
            return
        (names, before), self._kept = self._kept, None
        after = self._sample(names)
        if after is None or after.shape != before.shape:
            return
        usable = before.isfinite() & after.isfinite() & (before != 0)
        self._world.reads.add(torch.where(usable, after / before, float("nan")), self._take)

    def _take(self, found: Sequence[float]) -> None:
        """Take this rank's factor from the ratios of elements, NaN where there is none."""
        ratios = [ratio for ratio in found if not math.isnan(ratio)]
        if len(ratios) < 2:
            return
        low, high = min(ratios), max(ratios)
        if low > 0 and high - low <= UNIFORM * high:
            self._factor = sorted(ratios)[len(ratios) // 2]

    def compare(self, call: int) -> None:
        """Compare the factors of the last step between ranks. Collective, with the same number `call` on all ranks."""
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
        """Stop watching and remove the hook of the optimizer."""
        self._done = True
        self._handle.remove()

    def _sample(self, names: Sequence[str]) -> torch.Tensor | None:
        """Sample elements of the gradients of some parameters; None if one of them no longer has a gradient."""
        parts = []
        for name in names:
            gradient = self._parameters.tensors[name].grad
            if gradient is None or not _dense(gradient):
                return None
            flat = flat_part(gradient).detach().reshape(-1)
            parts.append(flat[:: max(flat.numel() // ELEMENTS, 1)][:ELEMENTS].double())
        return torch.cat(parts) if parts else None

    def _warn(self, factors: Sequence[float]) -> None:
        by_stage = {self._stages[rank]: factor for rank, factor in enumerate(factors) if factor != _UNKNOWN}
        told = ", ".join(f"{stage} by {factor:.4g}" for stage, factor in by_stage.items())
        log.get("RaNNCModule").warning(
            "Between their reduction and optimizer.step, gradients were scaled by different factors: %s. A norm over "
            "the parameters that one rank holds is the norm of its stage only: clip with model.clip_grad_norm(x) or "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), x), which compute the norm over the whole model",
            told,
        )


def _dense(gradient: torch.Tensor | None) -> bool:
    return (
        gradient is not None
        and gradient.layout is torch.strided
        and flat_part(gradient).numel() > 0
        and gradient.is_floating_point()
    )
