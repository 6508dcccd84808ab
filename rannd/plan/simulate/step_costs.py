"""Costs of the actions of a Program: the input of the simulator."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rannd.plan.schedule.program import Edge

FIRST_BUCKET = 1 << 20
"""Bytes of the first gradient bucket, which is small so that its reduction starts early."""
BUCKET = 25 << 20
"""Bytes of the other buckets."""


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds and bytes per microbatch, by stage and by edge; costs that arise once per step, by stage."""

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    """Both halves, and the repeated forward if the stage recomputes activations."""
    weight_us: tuple[float, ...]
    """The part of `backward_us` that a schedule may delay; 0 if the backward cannot be split."""
    values_us: Mapping[Edge, float]
    """Time to send a microbatch's activations to a slot of the same node."""
    grads_us: Mapping[Edge, float]
    reduce_us: tuple[tuple[float, ...], ...]
    """Time to reduce each bucket of a stage's own parameters over its replicas, in the order in which they start;
    without what `after_us` has of it."""
    after_us: tuple[float, ...] = ()
    """Time of what follows the reductions, by stage: what they take of the slots' processors themselves, gathering its
    parameters after the optimizer (ZeRO 1 and 2), and copies of the optimizer's state that is elsewhere between steps;
    empty without all of it."""
    host_us: float = 0.0
    """Time that each action, transfers too, takes of its slot's host, during which the slot computes nothing,"""
    byte_us: float = 0.0
    """and each byte of a message, at the sender as well as at the receiver."""
    agreeing_us: float = 0.0
    """Time at the start of a step: the agreement between ranks, and what the runtime takes once."""
    tied_us: tuple[tuple[float, ...], ...] = ()
    """As `reduce_us`, for parameters that several stages share, in the order of `Layout.tied`."""
    nodes: tuple[int, ...] = ()
    """Node of each slot; empty if all are on one."""
    far_values_us: Mapping[Edge, float] | None = None
    """Time to send a microbatch's activations to another node; None: the same as `values_us`."""
    far_grads_us: Mapping[Edge, float] | None = None
    state_bytes: tuple[int, ...]
    """Memory that a stage always holds: parameters, gradients, optimizer state."""
    kept_bytes: tuple[int, ...]
    """Kept per microbatch from its forward to the end of its backward, both halves; received messages do not count."""
    weight_bytes: tuple[int, ...]
    """The part of it that stays after the first half of a split backward."""
    working_bytes: tuple[int, ...]
    """Additional memory while a forward or backward runs."""
    values_bytes: Mapping[Edge, int]
    grads_bytes: Mapping[Edge, int]

    @property
    def split(self) -> frozenset[int]:
        """The stages whose backward may be split."""
        return frozenset(stage for stage, us in enumerate(self.weight_us) if us > 0)


def bucket_sizes(nbytes: int) -> list[int]:
    """Return the bytes of the buckets for `nbytes` of gradients, in the order in which they start."""
    sizes, left, most = [], nbytes, FIRST_BUCKET
    while left > 0:
        sizes.append(min(left, most))
        left, most = left - sizes[-1], BUCKET
    return sizes
