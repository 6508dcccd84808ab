"""Values on their way and in the store: large ones are compressed, by the client, so that the daemon stays quick."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from rannd.daemon.common.protocol import COMPRESSED, MAX_VALUE
from rannd.errors import ProtocolError

LEVEL = 1
"""Traces get four times smaller at this level, and hardly more at higher ones (docs/daemon.md)."""


class PackedValue(NamedTuple):
    """A value, compressed where `size` says how many bytes it had before."""

    data: bytes
    size: int = 0

    def plain(self) -> bytes:
        """The value as it was. ProtocolError where the compressed bytes are not of that many."""
        if not self.size:
            return self.data
        if self.size > MAX_VALUE:
            raise ProtocolError(f"a compressed value claims {self.size} bytes, {MAX_VALUE} are allowed")
        unpacker = zlib.decompressobj()
        try:
            found = unpacker.decompress(self.data, self.size + 1)  # never more than it claims
        except zlib.error as exc:
            raise ProtocolError(f"a compressed value is damaged: {exc}") from None
        if len(found) != self.size or not unpacker.eof:
            raise ProtocolError(f"a compressed value is not of the {self.size} bytes that it claims")
        return found


def pack(value: bytes) -> PackedValue:
    """A value as it travels and is kept: compressed above COMPRESSED bytes, if that makes it smaller."""
    if len(value) > COMPRESSED:
        data = zlib.compress(value, LEVEL)
        if len(data) < len(value):
            return PackedValue(data, len(value))
    return PackedValue(value)
