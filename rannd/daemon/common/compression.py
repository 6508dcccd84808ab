"""Compresses large values. The client does it, so that the daemon stays responsive."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from rannd.daemon.common.protocol import COMPRESSED, MAX_VALUE
from rannd.errors import ProtocolError

LEVEL = 1
"""zlib level: traces become four times smaller, and hardly smaller at higher levels (docs/daemon.md)."""


class PackedValue(NamedTuple):
    """A value, compressed if `size`, its number of bytes before, is not 0."""

    data: bytes
    size: int = 0

    def plain(self) -> bytes:
        """Return the value, decompressed; ProtocolError if the data is damaged or not of the size it claims."""
        if not self.size:
            return self.data
        if self.size > MAX_VALUE:
            raise ProtocolError(f"a compressed value claims {self.size} bytes, {MAX_VALUE} are allowed")
        unpacker = zlib.decompressobj()
        try:
            found = unpacker.decompress(self.data, self.size + 1)  # at most what it claims, plus 1
        except zlib.error as exc:
            raise ProtocolError(f"a compressed value is damaged: {exc}") from None
        if len(found) != self.size or not unpacker.eof:
            raise ProtocolError(f"a compressed value does not have the {self.size} bytes that it claims")
        return found


def pack(value: bytes) -> PackedValue:
    """Compress a value above COMPRESSED bytes, if that makes it smaller."""
    if len(value) > COMPRESSED:
        data = zlib.compress(value, LEVEL)
        if len(data) < len(value):
            return PackedValue(data, len(value))
    return PackedValue(value)
