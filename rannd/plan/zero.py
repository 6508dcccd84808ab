"""ZeRO: what the replicas of a stage hold of parameters, gradients and the optimizer's state, and what moving it takes.

Own parameters of a stage are divided among its replicas; those that other stages read too are whole on each.
Gradients are reduce-scattered, and parameters gathered: each is half of an all-reduce (a ring's all-reduce is the one
and then the other). With stages 1 and 2 parameters are gathered when the optimizer is done. With stage 2 gradients of
every piece are scattered behind its backward. With stage 3 a replica gathers the parameters of a block, and of the next
one, for each forward and each backward of a piece.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]


class ReplicaBytes(NamedTuple):
    """Bytes of a replica, all the time but for `working`. Tables of any shape."""

    params: Table
    grads: Table
    """Gradients, and as much again for those of a step that waits."""
    optimizer: Table
    working: Table
    """Of the largest block, for a moment: its whole gradients, its parameters and those of the next one."""

    @property
    def state(self) -> Table:
        return self.params + self.grads + self.optimizer


def held(
    zero: int, replicas: npt.ArrayLike, *, params: Table, trainable: Table, shared: Table, unit: Table, factor: float
) -> ReplicaBytes:
    """What a stage holds, of tables that broadcast against `replicas`.

    `params`: bytes of parameters and buffers; `trainable`: of them; `shared`: of these, read by other stages too;
    `unit`: trainable bytes of its largest block; `factor`: bytes of optimizer state for one of `trainable`.
    """
    count = np.asarray(replicas, dtype=float)
    parts = shared + (trainable - shared) / count
    unit = unit * (count > 1)
    return ReplicaBytes(
        params - trainable + parts if zero >= 3 else params,
        2.0 * (parts if zero >= 2 else trainable),
        factor * (parts if zero >= 1 else trainable),
        unit * 3.0 if zero >= 3 else unit if zero == 2 else np.zeros_like(unit),
    )


def computing(zero: int, forward: Table, backward: Table, gather: Table) -> tuple[Table, Table]:
    """Forward and backward of a piece, where `gather` is the time to gather all parameters, or to scatter gradients.

    Moving hides behind computing, and what does not fit behind it takes its time.
    """
    if zero == 2:
        backward = np.maximum(backward, gather)
    if zero == 3:
        forward, backward = np.maximum(forward, gather), np.maximum(backward, 2.0 * gather)
    return forward, backward
