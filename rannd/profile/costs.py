"""Cost table of a model on a device: what the profiler passes to the planner.

No torch in this file: ``rannd.plan`` reads it without loading torch. Times are in microseconds, sizes in bytes.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from rannd.graph.fx.ir import Size

Latency: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Bandwidth: TypeAlias = Annotated[float, Meta(ge=1e-3, le=1e12)]
HostTime: TypeAlias = Annotated[float, Meta(ge=0, le=1e3)]
"""What is read has to be possible: up to a quarter of an hour, from 1 KB to a million TB per second, and what a
processor takes for a byte at that speed. It is checked when a stored link is decoded: a plan divides by the bandwidth.
"""


class BlockCost(msgspec.Struct, frozen=True, array_like=True):
    """Cost of one block (a convex set of ops) for one microbatch, as functions of its number of rows."""

    forward_us: Size
    backward_us: Size
    activation_bytes: Size
    """Bytes kept from the forward until the backward of the microbatch, without parameters."""
    weight_us: Size = Size()
    """The part of `backward_us` that computes parameter gradients which can be delayed."""
    most_rows: int = 0
    """Maximum number of rows with which the block alone did not run out of memory; 0: no limit was found."""
    kept: tuple[int, ...] = ()
    """Values of the graph (by number, each once) that `activation_bytes` includes and that other blocks may keep, too,
    or that a stage receives or sends."""
    add_us: float = 0.0
    """Time to accumulate a microbatch's parameter gradients; the first microbatch's are used as they are."""

    def scaled(self, forward: float, backward: float) -> BlockCost:
        """Return the cost with its times multiplied by these factors."""
        return msgspec.structs.replace(
            self,
            forward_us=self.forward_us.scaled(forward),
            backward_us=self.backward_us.scaled(backward),
            weight_us=self.weight_us.scaled(backward),
        )


class LinkCost(msgspec.Struct, frozen=True, array_like=True):
    """Latency and bandwidth between two ranks, and of an all-reduce among all of them."""

    p2p_latency_us: Latency
    p2p_bytes_per_us: Bandwidth
    allreduce_latency_us: Latency
    allreduce_bytes_per_us: Bandwidth
    """Bytes of the reduced buffer per microsecond for two ranks; with n ranks each moves 2(n-1)/n times the buffer."""
    p2p_host_us: HostTime = 0.0
    """What a byte of a message takes of the sender's processor, and as much of the receiver's, while they compute
    nothing: part of the time that it takes, in which both may copy at once. 0 where other processors do."""
    allreduce_host_us: HostTime = 0.0
    """Likewise of each rank's processor for a byte of the reduced buffer, for two ranks: all of its time, or 0."""

    def p2p_us(self, nbytes: float) -> float:
        """Time of `nbytes` on their way from one rank to another, beside what the processors of both do for them."""
        byte_us = max(1.0 / self.p2p_bytes_per_us - 2.0 * self.p2p_host_us, 0.0)
        return self.p2p_latency_us + nbytes * byte_us if nbytes > 0 else 0.0

    def allreduce_us(self, nbytes: float, ranks: int) -> float:
        """Time of a ring all-reduce of `nbytes` among `ranks` ranks."""
        if ranks <= 1 or nbytes <= 0:
            return 0.0
        steps = 2.0 * (ranks - 1)
        return steps / 2.0 * self.allreduce_latency_us + steps / ranks * nbytes / self.allreduce_bytes_per_us

    def reduction_us(self, nbytes: float, ranks: int) -> tuple[float, float]:
        """Time of an all-reduce beside what each rank's processor does for it, and that."""
        whole = self.allreduce_us(nbytes, ranks)
        host = min(2.0 * (ranks - 1) / ranks * nbytes * self.allreduce_host_us, whole)
        return whole - host, host


class RuntimeCost(msgspec.Struct, frozen=True, array_like=True):
    """What the runtime itself takes of a rank's time, beside blocks and links."""

    action_us: Latency = 0.0
    """Of each forward and each backward of a piece in a stage, or segment."""
    call_us: Latency = 0.0
    """Of each step."""
    host_us: Latency = 0.0
    """Of the host between computations, for each computation of a piece in a stage, and each message on both sides."""


class CostTable(msgspec.Struct, frozen=True):
    """Costs of all blocks (in the order of the planner's blocks) and of the links."""

    blocks: tuple[BlockCost, ...]
    link: LinkCost
    """Between devices of the same node."""
    between: LinkCost | None = None
    """Between devices of different nodes; None: the same as `link`."""
    runtime: RuntimeCost = RuntimeCost()
