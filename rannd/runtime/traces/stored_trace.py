"""A trace, or a template of traces, as it lies in the cache."""

from __future__ import annotations

import msgspec

from rannd.graph.fx.encoding import Broken


class StoredTrace(msgspec.Struct, frozen=True, array_like=True):
    """The data of a trace, and what was found out about it when it was made."""

    graph_hash: str
    """Of the graph that is built from it; '' for a template."""
    checked: str | None
    """'': it was compared with the model, and computes the same; other text: why it could not be compared; None: it was
    not tried (verify_trace=false)."""
    data: bytes


def pack(trace: StoredTrace) -> bytes:
    """A trace as bytes."""
    return msgspec.msgpack.encode(trace)


def unpack(data: bytes) -> StoredTrace:
    """The trace in bytes from a cache; Broken where there is none."""
    try:
        return msgspec.msgpack.decode(data, type=StoredTrace)
    except msgspec.DecodeError as exc:
        raise Broken(f"it is not in the form of a stored trace: {exc}") from exc
