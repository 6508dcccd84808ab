"""File format for cache entries: `rannc-cache export` writes it and `rannc-cache import` reads it.

::

    file    = magic, frame of Header, frame of Exported (any number), frame of End
    magic   = "rannd cache export" and a line feed, in ASCII
    frame   = length, checksum, content
    length      of the content in bytes, 4 bytes, big-endian
    checksum    BLAKE2b-128 of the content, 16 bytes
    content     msgpack, tagged by its "t" field

A signed file has format 2, and in its End an HMAC-SHA256 of the magic and of length and content of each frame before,
with a key of the user's. Checksums find damage, a signature finds files that somebody without the key made or changed.

The magic, the frame and the field `format` of the header never change, so that any version of rannd can say which one
is needed. Files are read and written one frame at a time: only one entry is in memory.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from typing import Annotated, BinaryIO, TypeAlias

import msgspec
from msgspec import Meta

from rannd.daemon.common import protocol
from rannd.daemon.common.compression import PackedValue
from rannd.daemon.common.keys import digest_of
from rannd.daemon.common.printable import plain
from rannd.errors import ProtocolError, UsageError

FORMAT = 2
"""Version of the file format; files without a signature have 1."""
NEVER = "compiled"
"""Kind of entries that are not exported: their files are code, which torch unpickles."""
MAGIC = b"rannd cache export\n"
MAX_FRAME = protocol.MAX_VALUE + (2 << 20)
"""Maximum bytes of one frame's content; an entry of that size still fits into a message."""
CHECKSUM = 16
LENGTH = 4


class Header(msgspec.Struct, frozen=True, tag_field="t", tag="header"):
    """First frame of a file. Unknown fields come from a newer version and are ignored."""

    format: Annotated[int, Meta(ge=1, lt=1 << 31)]
    rannd: protocol.Text
    """Version that wrote the file."""
    created: Annotated[float, Meta(ge=0)]
    """Seconds since the epoch."""


class Exported(msgspec.Struct, frozen=True, tag_field="t", tag="entry", forbid_unknown_fields=True):
    """One entry of the cache."""

    key: protocol.Digest
    """Digest of `kind` and `components`."""
    kind: protocol.Kind
    components: protocol.Components
    rannd: protocol.Text
    """Version that wrote the value."""
    created: Annotated[float, Meta(ge=0)]
    """Time when the value was stored, in seconds since the epoch."""
    size: Annotated[int, Meta(ge=0, le=protocol.MAX_VALUE)]
    """Bytes of the value before zlib compression; 0: not compressed."""
    value: protocol.Value


class End(msgspec.Struct, frozen=True, tag_field="t", tag="end", forbid_unknown_fields=True, omit_defaults=True):
    """Last frame of a file: without it the file is truncated."""

    entries: protocol.Count
    """Number of entries in the file."""
    signature: Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")] = ""


_Frame: TypeAlias = Header | Exported | End

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Exported | End] = msgspec.msgpack.Decoder(Exported | End)
_headers: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


class ExportWriter:
    """Writes entries to an open file."""

    def __init__(self, opened: BinaryIO, rannd: str, created: float, key: bytes | None = None) -> None:
        """Write the header.

        `rannd`: version of the writer; `created`: current time, in seconds since the epoch; `key`: to sign with.
        """
        self._file = opened
        self._entries = 0
        self._signature = _signature(key)
        self._file.write(MAGIC)
        self._frame(Header(FORMAT if key is not None else 1, rannd, created))

    def add(self, entry: Exported) -> None:
        """Write one entry.

        Raises:
            UsageError: It is too large for a file.
        """
        self._frame(entry)
        self._entries += 1

    def end(self) -> None:
        """Write the last frame, without which the file is refused."""
        self._frame(End(self._entries, self._signature.hexdigest() if self._signature is not None else ""))

    def _frame(self, frame: _Frame) -> None:
        content = _encoder.encode(frame)
        if len(content) > MAX_FRAME:
            raise UsageError(f"an entry of {len(content)} bytes is above the limit of {MAX_FRAME} bytes")
        length = len(content).to_bytes(LENGTH, "big")
        if self._signature is not None:
            self._signature.update(length + content)
        self._file.write(length)
        self._file.write(_checksum(content))
        self._file.write(content)


def read(opened: BinaryIO, key: bytes | None = None) -> Iterator[Exported]:
    """Yield the entries of a file, each fully checked: checksum, limits, key, and that its value can be decompressed.

    With a `key`, the file has to be signed with it; that is known at its end.

    Raises:
        UsageError: The file is not an export, is damaged or truncated, has a newer format, or is not signed with the
            key. Entries yielded before are sound.
    """
    signature = _signature(key)
    if opened.read(len(MAGIC)) != MAGIC:
        raise UsageError("it is not a cache export; name a file that `rannc-cache export` wrote")
    _check_header(_content(opened, "its header", signature))
    number = 0
    while True:
        where = f"entry {number + 1}"
        expected = signature.hexdigest() if signature is not None else ""
        content = _content(opened, where, signature)
        try:
            frame = _decoder.decode(content)
        except (msgspec.DecodeError, RecursionError) as exc:
            raise UsageError(f"{where} is not a cache entry: {exc}; export the cache again") from None
        if isinstance(frame, End):
            break
        _check_entry(frame, where)
        yield frame
        number += 1
    if frame.entries != number:
        raise UsageError(f"it contains {number} entries, but its end says {frame.entries}; copy or export it again")
    if signature is not None and not hmac.compare_digest(frame.signature, expected):
        wrong = "is not signed with this key" if frame.signature else "is not signed"
        raise UsageError(f"it {wrong}: somebody else has made or changed it, or it was exported with another key")
    if opened.read(1):
        raise UsageError(f"there is data after its end, after {number} entries; copy or export it again")


def _signature(key: bytes | None) -> hmac.HMAC | None:
    return None if key is None else hmac.new(key, MAGIC, hashlib.sha256)


def _content(opened: BinaryIO, where: str, signature: hmac.HMAC | None) -> bytes:
    """Return the content of the next frame, and add it to the signature."""
    head = _exactly(opened, LENGTH + CHECKSUM, where)
    length = int.from_bytes(head[:LENGTH], "big")
    if length > MAX_FRAME:
        raise UsageError(f"{where} claims {length} bytes, {MAX_FRAME} are allowed; copy or export it again")
    content = _exactly(opened, length, where)
    if _checksum(content) != head[LENGTH:]:
        raise UsageError(f"{where} is damaged, its checksum does not match; copy or export it again")
    if signature is not None:
        signature.update(head[:LENGTH] + content)
    return content


def _exactly(opened: BinaryIO, length: int, where: str) -> bytes:
    data = opened.read(length)
    if len(data) < length:
        raise UsageError(f"it is truncated: it ends where {where} should be; copy or export it again")
    return data


def _check_header(content: bytes) -> None:
    try:
        header = _headers.decode(content)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise UsageError(f"its header is invalid: {exc}; export the cache again") from None
    if header.format > FORMAT:
        raise UsageError(
            f"it is of format {header.format}, written by rannd {plain(header.rannd)}; this rannd reads format "
            f"{FORMAT}: update it"
        )


def _check_entry(entry: Exported, where: str) -> None:
    if entry.kind == NEVER:
        raise UsageError(f"{where} is compiled code, which is never taken from another cache; export the cache again")
    if entry.key != digest_of(entry.kind, entry.components):
        raise UsageError(f"{where}: key {entry.key[:12]} does not match its components; export the cache again")
    try:
        PackedValue(entry.value, entry.size).plain()
    except ProtocolError as exc:
        raise UsageError(f"{where}: {exc}; export the cache again") from None


def _checksum(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=CHECKSUM).digest()
