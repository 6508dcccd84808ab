"""Memory and time of a stage under ZeRO: what each replica holds, and what the collectives take.

A stage's own parameters are sharded across its replicas; those that other stages read too are whole on each. Parameters
are all-gathered, and with stages 2 and 3 gradients reduce-scattered; each takes half of an all-reduce (a ring
all-reduce is the one and then the other). With stages 1 and 2 parameters are gathered after the optimizer. With stage 2
the gradients of every microbatch are scattered after its backward. With stage 3 a replica gathers the parameters of a
block, and of the next one, for each forward and each backward of a microbatch, or, where memory suffices, for the first
forward: they stay whole until the last microbatch (and are gathered once more for a backward outside of the call).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Trained(NamedTuple):
    """Bytes of what belongs to trainable parameters of a stage."""

    whole: Table
    shared: Table
    """What of it belongs to parameters that other stages read, too."""


class WholeBytes(NamedTuple):
    """Bytes of what each replica has as a whole while a block needs it, of parameters that replicas divide."""

    params: Table
    """Parameters of the largest block."""
    two_params: Table
    """Those of the largest two neighbours."""
    grads: Table
    """Gradients of the largest block as they are reduced, but for parameters that several blocks read."""
    two_grads: Table
    """Those of the largest two neighbours."""
    tied_grads: Table
    """Gradients of all parameters that several blocks read, which are complete after the last of their backwards."""


class ReplicaBytes(NamedTuple):
    """Memory of a replica in bytes; all but `working` is held permanently. Arrays of any shape."""

    params: Table
    grads: Table
    """Gradients, and as much again for those of a delayed step."""
    optimizer: Table
    offloaded: Table
    """Parameters, gradients and optimizer state that are elsewhere while they are not needed; `optimizer` has what of
    the state is here at a time, `working` what of the others."""
    fetched: Table
    """The parameters among them."""
    working: Table
    """Temporary: a bucket, and the gradients of a block that are not added to others yet; with stages 2 and 3 whole
    gradients of a block, those of the two blocks before on their way, whole parameters of a block and the next one."""

    @property
    def state(self) -> Table:
        return self.params + self.grads + self.optimizer


def held(
    zero: int,
    replicas: npt.ArrayLike,
    *,
    params: Table,
    trainable: Trained,
    gradients: Trained,
    optimizer: Trained,
    units: WholeBytes,
    offload: float = 0.0,
    away: bool = False,
    grads_away: bool = False,
    bucket: float = 0.0,
) -> ReplicaBytes:
    """Return what a replica of a stage holds; all tables broadcast against `replicas`.

    Args:
        zero: ZeRO stage.
        replicas: Number of replicas of the stage.
        params: Bytes of parameters and buffers.
        trainable: Bytes of the trainable ones among them.
        gradients: Bytes of their gradients, with those of a delayed step.
        optimizer: Bytes of the optimizer's state of them.
        units: What a replica has as a whole at a time.
        offload: Parameter bytes of a bucket whose state is on the device at a time; 0: all state is always there.
        away: Whether the parameters that replicas share are elsewhere while no segment reads them (with stage 3).
        grads_away: Whether their gradients are elsewhere, too.
        bucket: Bytes of gradients that are copied to be reduced together.
    """
    count = np.asarray(replicas, dtype=float)

    def parts(each: Trained) -> Table:
        found: Table = each.shared + (each.whole - each.shared) / count
        return found

    state = parts(optimizer) if zero >= 1 else optimizer.whole + 0.0 * count
    here = state
    if offload:
        # Two buckets: one is stepped, the next one comes. A large parameter is a bucket of its own.
        largest = np.maximum(offload, units.params / count if zero else units.params)
        weight = np.divide(
            optimizer.whole, trainable.whole, out=np.zeros_like(optimizer.whole), where=trainable.whole > 0
        )
        here = np.minimum(state, 2.0 * largest * weight)
    # A bucket that is reduced is a copy, and each gradient of a microbatch is there before it is added.
    each = units.grads + units.tied_grads
    working = each + np.minimum(gradients.whole - trainable.whole, np.maximum(bucket, each))
    grads, elsewhere, fetched = gradients.whole, 0.0 * state, 0.0 * state
    if offload:
        elsewhere = state
    if zero >= 2:
        grads = parts(gradients)
        # A sum of gradients takes as much again, but for a replica's own part, to receive those of other replicas.
        received = (count - 1) / count * np.maximum(units.grads, units.tied_grads)
        divided = units.tied_grads + units.two_grads + units.grads + 2.0 * received
        working = np.where((count > 1) | away, divided + (zero >= 3) * units.two_params, working)
    if zero >= 3:
        own = parts(trainable)
        params = params - trainable.whole + own
        if away:
            fetched = own - trainable.shared
            params, elsewhere = params - fetched, elsewhere + fetched
            if grads_away:
                dropped = grads - gradients.shared
                elsewhere, grads = elsewhere + dropped, grads - dropped
            else:  # a step has copies of parameters that it changes: of two buckets, if state comes by buckets
                here = here + (np.minimum(fetched, 2.0 * largest) if offload else fetched)
    return ReplicaBytes(params, grads, here, elsewhere, fetched, working)


SEGMENT = 8 << 20
"""Bytes of gradients up to which neighbouring blocks are one segment with stages 2 and 3, where memory suffices: a
segment costs its own run of autograd and its own messages, in each microbatch."""
LEAST_OFFLOADED = 1 << 18
"""Bytes from which a gradient, or a value that a segment starts from, is worth being elsewhere."""
ASSUMED_RATES = {"cuda": 20e3}
"""Bytes per microsecond between the device and where state is between steps: pinned memory over PCIe 4."""
ASSUMED_FILE_RATE = 2e3
"""The same for files, on a disk of NVMe. None is measured; the kernel may still have in memory what it wrote."""


def in_files(device: str) -> bool:
    """Whether what is offloaded is in files, which ranks change where it is; so gradients can be there, too."""
    return device not in ASSUMED_RATES


def offload_us(offloaded: Table, device: str) -> Table:
    """Time to copy what a step changes to the device and back, beside which there is little to compute."""
    return 2.0 * fetch_us(offloaded, device)


def fetch_us(offloaded: Table, device: str) -> Table:
    """Time to copy something to the device."""
    return offloaded / ASSUMED_RATES.get(device, ASSUMED_FILE_RATE)


def replica_counts(zero: int, allowed: npt.NDArray[np.int64], world: int) -> list[npt.NDArray[np.int64]]:
    """Return which of the allowed numbers of replicas stages of a plan may have, once for each kind of plan.

    With stages 2 and 3 replicas meet in each microbatch. Where stages have different numbers of replicas, some wait for
    others in a circle (`rannd.plan.schedule.stream_checker`), so all have equally many.
    """
    return [allowed] if zero < 2 else [np.array([count]) for count in allowed if world % count == 0]


def reduced_part(zero: int) -> float:
    """What reducing a stage's own gradients takes, as a part of their all-reduce.

    With stage 1 every replica keeps whole gradients; with stages 2 and 3 they are only reduce-scattered.
    """
    return 0.5 if zero >= 2 else 1.0


def computing(
    zero: int,
    forward: Table,
    backward: Table,
    gather: Table,
    fetch: Table | float = 0.0,
    *,
    gathers: tuple[Table | float, Table | float] = (1.0, 1.0),
) -> tuple[Table, Table]:
    """Return the forward and backward time of a microbatch with the collectives of ZeRO.

    Collectives overlap with computing; only what exceeds the computing time adds to it. Copies are counted as if they
    did not, as those from files do not.

    Args:
        zero: ZeRO stage.
        forward: Time without collectives.
        backward: The same.
        gather: Time to gather all parameters, or to scatter all gradients.
        fetch: Time to copy a replica's own parameters to the device, if they are elsewhere.
        gathers: How often a forward, and a backward, gathers parameters with stage 3, see `gathers_of`.
    """
    if zero == 2:
        backward = np.maximum(backward, gather)
    if zero == 3:
        first, again = gathers
        forward = first * np.maximum(forward, gather) + (1.0 - first) * forward + fetch
        backward = np.maximum(backward, (1.0 + again) * gather) + fetch
    return forward, backward


def gathers_of(stays_whole: Mask | bool, pieces: npt.ArrayLike) -> tuple[Table, Table]:
    """How often a forward, and a backward, gathers parameters with stage 3, in the mean of `pieces` microbatches.

    Where they stay whole only the first of all forwards does, if backward runs inside of the call.
    """
    return np.where(stays_whole, 1.0 / np.asarray(pieces, dtype=float), 1.0), np.where(stays_whole, 0.0, 1.0)
