"""Device types whose autocast regions are part of a call."""

from __future__ import annotations

from rannd.device.identity import CUDA, has_accelerator

AUTOCAST_TYPES = ("cpu", CUDA)
"""All of them, whatever this build of torch can use: a graph that was traced elsewhere may name them."""


def usable_autocast_types() -> tuple[str, ...]:
    """Those that can be entered in this process without a warning."""
    return AUTOCAST_TYPES if has_accelerator() else ("cpu",)
