"""Recognises out-of-memory errors of any device."""

from __future__ import annotations

import errno

import torch

from rannd.errors import text_of

_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "Cannot allocate memory",
    "_ALLOC_FAILED",  # status of cuBLAS and cuDNN, where no memory is left for a handle
)


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether an exception reports that memory ran out, on any device."""
    if isinstance(exc, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(exc, OSError):
        return exc.errno == errno.ENOMEM
    return isinstance(exc, RuntimeError) and any(word in text_of(exc) for word in _WORDS)
