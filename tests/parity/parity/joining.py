"""How many blocks of a small model are a segment together under ZeRO 2 and 3: by default all would be one."""

from __future__ import annotations

from collections.abc import Callable

from parity.plan_keys import own_keys
from rannd.plan.stage_costs import estimate

JOINED = 5 << 10
"""Bytes of gradients of a joined segment: two or three blocks of most models."""


def join_blocks(most: int) -> Callable[[], None]:
    """Have blocks with up to `most` bytes of gradients be one segment; returns what undoes it."""
    before, estimate.SEGMENT = estimate.SEGMENT, most
    undo_keys = own_keys("joined", str(most))

    def undo() -> None:
        estimate.SEGMENT = before
        undo_keys()

    return undo
