"""What all stages of a plan share."""

from __future__ import annotations

import msgspec


class Variant(msgspec.Struct, frozen=True, order=True):
    """Properties that all stages of a plan share."""

    schedule: str
    microbatches: int
    placement: str
    zero: int = 0
    """ZeRO stage, see zero.py."""
