"""Values as bytes, for other ranks and for files: torch.save writes them, and reading them runs no code."""

from __future__ import annotations

import io
from typing import Any

import torch

from rannd.errors import UsageError
from rannd.runtime.storage.saved_value import read_value


def seal(value: Any, what: str) -> bytes:
    """Serialize a value for `unseal`; UsageError if it could not be read without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        unseal(buffer.getvalue())
    except Exception as exc:  # pickle raises all kinds of errors
        raise UsageError(
            f"{what} contains an object that cannot be sent or stored safely ({_culprit(value, what)}); use numbers, "
            "strings, bytes, None, lists, tuples, sets, dicts and tensors only"
        ) from exc
    return buffer.getvalue()


def unseal(data: bytes) -> Any:
    """Deserialize a value that `seal` serialized. ValueError where it is damaged."""
    return read_value(io.BytesIO(data), 0, len(data))


def _culprit(value: Any, path: str) -> str:
    """Find the object inside a value that cannot be stored; returns its path and type as text."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{place}]", each) for place, each in enumerate(value)]
    for inner, each in items:
        try:
            buffer = io.BytesIO()
            torch.save(each, buffer)
            unseal(buffer.getvalue())
        except Exception:
            return _culprit(each, inner)
    return f"{path} is a {type(value).__module__}.{type(value).__qualname__}"
