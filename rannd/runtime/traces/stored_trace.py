"""Cache format of a trace or template, with the result of its comparison with the model."""

from __future__ import annotations

import msgspec

from rannd.graph.stored.encoding import Broken


class StoredTrace(msgspec.Struct, frozen=True, array_like=True):
    """Encoded trace, and the result of comparing it with the model."""

    graph_hash: str
    """Hash of the graph built from it; '' for a template."""
    checked: str | None
    """'': its results equal the model's; other text: why they could not be compared; None: they were not compared
    (verify_trace=false)."""
    data: bytes


def pack(trace: StoredTrace) -> bytes:
    """Serialize a trace."""
    return msgspec.msgpack.encode(trace)


def unpack(data: bytes) -> StoredTrace:
    """Deserialize a trace from the cache; Broken if `data` is not a valid one."""
    try:
        return msgspec.msgpack.decode(data, type=StoredTrace)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as exc:
        raise Broken(f"it is not a valid stored trace: {exc}") from exc
