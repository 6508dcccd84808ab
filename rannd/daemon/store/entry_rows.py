"""Rows of the store: encoding of entries, and checks of their integrity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from rannd.daemon.common.protocol import STORE, EntryInfo, NewEntry

FORMAT = STORE
"""Version of an entry's format."""
INFO = "key, kind, format, rannd, created, used, hits, length, checksum, components, size"
"""Columns of an entry without its value, in the order of EntryInfo."""
COMPILED = "compiled"
"""Kind of entries whose value is the number of bytes in a folder of compiled code (`compiled_folders.py`)."""
WEIGHT = (
    f"(length + CASE kind WHEN '{COMPILED}' THEN min(max(CAST(CAST(value AS TEXT) AS INTEGER), 0), 1 << 50) ELSE 0 END)"
)
"""Bytes that an entry takes up, its folder included."""
LISTED = INFO.replace("length", WEIGHT)
"""As INFO, for lists: the length is the weight."""


def new_row(entry: NewEntry, rannd: str, now: float) -> tuple[Any, ...]:
    """Return the row of an entry that version `rannd` writes at `now` (seconds since the epoch): INFO and the value."""
    components = json.dumps(entry.components, sort_keys=True)
    proof = checksum(entry.key, entry.kind, FORMAT, components, entry.size, entry.value)
    described = (entry.key, entry.kind, FORMAT, rannd, now, now, 0, len(entry.value), proof, components)
    return (*described, entry.size, entry.value)


def checksum(key: str, kind: str, number: int, components: str, size: int, value: bytes) -> str:
    """Return the BLAKE2b-128 digest of an entry without times and counts."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([key, kind, number, components, size]).encode("ascii"))
    digest.update(value)
    return digest.hexdigest()


def fault(row: Sequence[Any]) -> str | None:
    """Return what is wrong with a whole row, None if it is sound."""
    found, value = description(row[:-1]), row[-1]
    if found is None:
        return "its description is unreadable"
    if found.format != FORMAT:
        return f"it has format {found.format}, this version of rannd reads {FORMAT}"
    if not isinstance(value, bytes) or len(value) != found.length:
        return "its length does not match"
    if checksum(found.key, found.kind, found.format, row[9], found.size, value) != found.checksum:
        return "its checksum does not match"
    return None


def description(row: Sequence[Any]) -> EntryInfo | None:
    """Decode a row without its value; None if it is unreadable."""
    try:
        fields = dict(zip(EntryInfo.__struct_fields__, row, strict=True))
        fields["components"] = json.loads(row[9])
        return msgspec.convert(fields, EntryInfo)
    except (ValueError, TypeError):
        return None
