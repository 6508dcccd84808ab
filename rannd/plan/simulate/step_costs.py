"""What the actions of a Program cost: the numbers that the simulator plays with."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rannd.plan.schedule.program import Edge

FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket of gradients that are reduced together, which starts early."""
BUCKET = 25 << 20
"""Bytes of the others."""


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds and bytes of one piece, by stage and by edge; what a step does once, by stage."""

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    """Both halves, and the forward once more where the stage recomputes."""
    weight_us: tuple[float, ...]
    """The part of `backward_us` that a schedule may run later; 0 where backward does not come in two halves."""
    values_us: Mapping[Edge, float]
    """To move a piece's values to a slot of the same node."""
    grads_us: Mapping[Edge, float]
    reduce_us: tuple[tuple[float, ...], ...]
    """To reduce each bucket of a stage's own parameters over its replicas, in the order in which they start."""
    gather_us: tuple[float, ...] = ()
    """To gather a stage's parameters when its optimizer is done (ZeRO 1 and 2), by stage; empty where nothing is."""
    agreeing_us: float = 0.0
    """What ranks tell each other before they begin."""
    tied_us: tuple[tuple[float, ...], ...] = ()
    """The same for parameters that several stages share, in the order of `Layout.tied`."""
    nodes: tuple[int, ...] = ()
    """Node of each slot; empty where all are on one."""
    far_values_us: Mapping[Edge, float] | None = None
    """To move a piece's values to another node; None: as within one."""
    far_grads_us: Mapping[Edge, float] | None = None
    state_bytes: tuple[int, ...]
    """What a stage holds all the time: parameters, gradients, the optimizer's state."""
    kept_bytes: tuple[int, ...]
    """Kept of a piece from its forward to the end of its backward, both halves; what was received is not counted."""
    weight_bytes: tuple[int, ...]
    """The part of it that stays after the first half of backward, where there are two."""
    working_bytes: tuple[int, ...]
    """Needed on top while a forward or backward runs."""
    values_bytes: Mapping[Edge, int]
    grads_bytes: Mapping[Edge, int]

    @property
    def split(self) -> frozenset[int]:
        """The stages whose backward may come in two halves."""
        return frozenset(stage for stage, us in enumerate(self.weight_us) if us > 0)


def bucket_sizes(nbytes: int) -> list[int]:
    """Bytes of the buckets in which `nbytes` of gradients are reduced, in the order in which they start."""
    sizes, left, most = [], nbytes, FIRST_BUCKET
    while left > 0:
        sizes.append(min(left, most))
        left, most = left - sizes[-1], BUCKET
    return sizes
