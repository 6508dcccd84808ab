"""Buckets: gradients with the same holders and dtype, which are reduced together, the last layers first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rannd.plan.simulate.step_costs import BUCKET, FIRST_BUCKET
from rannd.runtime.comm.world import World
from rannd.runtime.gradients.sharded_gradients import ShardedGradients
from rannd.runtime.parameters.ownership import Parameters


@dataclass
class GradientBucket:
    """Gradients that are reduced together."""

    slots: tuple[int, ...]
    names: list[str]
    waiting: int = 0
    """How often gradients have to be accumulated until all are computed; until the last backward of a stage, one for
    each parameter that it reads."""
    work: dist.Work | None = None
    flat: torch.Tensor | None = None
    """Flags that say which parameters have a gradient, followed by the flattened gradients."""
    active: list[str] = field(default_factory=list)
    """Names of the parameters reduced in this step; frozen ones are left out."""
    present: list[bool] = field(default_factory=list)
    """Which of them have a gradient: on this rank when the all-reduce starts, on some rank when it is finished."""


def shared_parameters(parameters: Parameters) -> list[str]:
    """Parameters with several holders."""
    return [
        name
        for name, tensor in parameters.tensors.items()
        if isinstance(tensor, torch.nn.Parameter) and len(parameters.slots[name]) > 1
    ]


def make_buckets(
    world: World, parameters: Parameters, consolidate: bool, sharded: ShardedGradients | Sequence[str]
) -> tuple[list[GradientBucket], list[tuple[int, ...]]]:
    """This rank's buckets in the order in which they start, and all sets of holders, the same list on every rank."""
    kinds: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name, tensor in parameters.tensors.items():
        if isinstance(tensor, torch.nn.Parameter):
            kinds.setdefault((parameters.slots[name], str(tensor.dtype)), []).append(name)
    buckets: list[GradientBucket] = []
    for slots, dtype in sorted(kinds):
        if world.slot not in slots:
            continue
        most, size = FIRST_BUCKET, 0
        current: list[str] = []
        for name in reversed([each for each in kinds[slots, dtype] if each not in sharded]):
            nbytes = parameters.tensors[name].numel() * parameters.gradient_dtypes(name).reduced.itemsize
            if current and size + nbytes > most and not consolidate:
                buckets.append(GradientBucket(slots, current))
                current, size, most = [], 0, BUCKET
            current.append(name)
            size += nbytes
        if current:
            buckets.append(GradientBucket(slots, current))
    return buckets, sorted({slots for slots, _ in kinds})
