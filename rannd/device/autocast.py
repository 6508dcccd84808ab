"""Device types whose autocast regions are part of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from rannd.device.identity import CUDA, has_accelerator

AUTOCAST_TYPES = ("cpu", CUDA)
"""All of them, whatever this build of torch can use: a graph that was traced elsewhere may name them."""


def usable_autocast_types() -> tuple[str, ...]:
    """Those that can be entered in this process without a warning."""
    return AUTOCAST_TYPES if has_accelerator() else ("cpu",)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """For as long as it is entered, nothing is cast, as in a backward outside of the script's autocast region."""
    with contextlib.ExitStack() as stack:
        for device in usable_autocast_types():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
