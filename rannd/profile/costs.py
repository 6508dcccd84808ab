"""What a model costs on a device: the values that profiling hands to the planner.

No torch in this file: ``rannd.plan`` reads it without loading torch. Times are microseconds, sizes bytes.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from rannd.graph.fx.ir import Size

Latency: TypeAlias = Annotated[float, Meta(ge=0)]
Bandwidth: TypeAlias = Annotated[float, Meta(gt=0)]
"""Checked where a stored link is read: a plan divides by it."""


class BlockCost(msgspec.Struct, frozen=True, array_like=True):
    """Cost of one block (a convex set of ops) for one piece, as functions of the piece's rows."""

    forward_us: Size
    backward_us: Size
    activation_bytes: Size
    """Kept from the forward until the backward of the piece, parameters not counted."""
    weight_us: Size = Size()
    """The part of `backward_us` that makes gradients of parameters, if it can run later than the rest; else 0."""
    most_rows: int = 0
    """With more rows than these, memory ran out while the block was measured alone; 0: it never did."""
    kept: tuple[int, ...] = ()
    """The graph's values (by number, each once) of which `activation_bytes` has the bytes, and that other blocks may
    keep too, or a stage receives or sends."""
    add_us: float = 0.0
    """To add a piece's gradients of parameters to those of earlier pieces; the first one's are taken as they are."""


class LinkCost(msgspec.Struct, frozen=True, array_like=True):
    """Latency and bandwidth of the connection between two ranks, and of an all-reduce among them."""

    p2p_latency_us: Latency
    p2p_bytes_per_us: Bandwidth
    allreduce_latency_us: Latency
    allreduce_bytes_per_us: Bandwidth
    """Bytes of the reduced buffer per microsecond for two ranks; n ranks move 2(n-1)/n times the buffer each."""

    def p2p_us(self, nbytes: float) -> float:
        """Time to move `nbytes` from one rank to another."""
        return self.p2p_latency_us + nbytes / self.p2p_bytes_per_us if nbytes > 0 else 0.0

    def allreduce_us(self, nbytes: float, ranks: int) -> float:
        """Time of a ring all-reduce of `nbytes` among `ranks` ranks."""
        if ranks <= 1 or nbytes <= 0:
            return 0.0
        steps = 2.0 * (ranks - 1)
        return steps / 2.0 * self.allreduce_latency_us + steps / ranks * nbytes / self.allreduce_bytes_per_us


class CostTable(msgspec.Struct, frozen=True):
    """Costs of all blocks (in the order of the planner's blocks) and of the links."""

    blocks: tuple[BlockCost, ...]
    link: LinkCost
    """Between devices of one node."""
    between: LinkCost | None = None
    """Between devices of different nodes; None: as within one."""
