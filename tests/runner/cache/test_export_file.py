"""The grammar of exported entries: what was written is read, nothing else is."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from rannd.daemon.common import keys, protocol
from rannd.daemon.common.compression import pack
from rannd.errors import UsageError
from rannd.runner.cache import export_file
from rannd.runner.cache.export_file import End, Exported, ExportWriter, Header, read


def entry(number: int, value: bytes = b"value", rannd: str = "0.1.0") -> Exported:
    key = keys.make_key("trace", {"number": number})
    packed = pack(value)
    return Exported(key.digest, key.kind, key.components, rannd, 1e9, packed.size, packed.data)


ENTRIES = [entry(1), entry(2, b""), entry(3, bytes(protocol.COMPRESSED + 1))]


def file(entries: list[Exported] = ENTRIES) -> bytes:
    opened = io.BytesIO()
    writer = ExportWriter(opened, "0.1.0", 1e9)
    for each in entries:
        writer.add(each)
    writer.end()
    return opened.getvalue()


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + export_file._checksum(content) + content


def with_header(**fields: object) -> bytes:
    header = {"t": "header", "format": 1, "rannd": "0.1.0", "created": 1e9, **fields}
    return export_file.MAGIC + frame(msgspec.msgpack.encode(header))


def with_entry(change: Callable[[dict[str, object]], object]) -> bytes:
    """A file of one entry in which something is changed, checksums included."""
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(ENTRIES[0]))
    change(told)
    return with_header() + frame(msgspec.msgpack.encode(told)) + frame(msgspec.msgpack.encode(End(1)))


def test_what_was_written_is_read() -> None:
    assert list(read(io.BytesIO(file()))) == ENTRIES
    assert list(read(io.BytesIO(file([])))) == []
    assert ENTRIES[2].size == protocol.COMPRESSED + 1, "one of them is compressed"


def test_the_grammar_stays_what_it_is() -> None:
    """Byte by byte: a change needs a new FORMAT."""
    header = b"\x84\xa1t\xa6header\xa6format\x01\xa5rannd\xa50.1.0\xa7created\xcb\x41\xcd\xcd\x65" + bytes(4)
    end = b"\x82\xa1t\xa3end\xa7entries\x00"
    assert file([]) == b"rannd cache export\n" + b"".join(
        bytes([0, 0, 0, len(content)]) + hashlib.blake2b(content, digest_size=16).digest() + content
        for content in (header, end)
    )
    assert msgspec.to_builtins(ENTRIES[0], builtin_types=(bytes,)) == {
        "t": "entry",
        "key": ENTRIES[0].key,
        "kind": "trace",
        "components": {"number": "1"},
        "rannd": "0.1.0",
        "created": 1e9,
        "size": 0,
        "value": b"value",
    }


def test_a_file_that_is_cut_off_anywhere_is_refused() -> None:
    whole = file(ENTRIES[:2])
    for length in range(len(whole)):
        with pytest.raises(UsageError, match=r"is truncated: it ends where|is not a cache export"):
            list(read(io.BytesIO(whole[:length])))


def test_a_byte_that_is_flipped_anywhere_is_found() -> None:
    whole = file(ENTRIES[:2])
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 0x10
        with pytest.raises(UsageError):
            list(read(io.BytesIO(broken)))


def test_entries_before_the_damage_are_sound() -> None:
    whole = file()
    found = read(io.BytesIO(whole[:-100] + b"x" + whole[-99:]))
    assert [next(found), next(found)] == ENTRIES[:2]
    with pytest.raises(UsageError, match="entry 3 is damaged, its checksum does not match"):
        next(found)


def signed(key: bytes = b"k" * 32) -> bytes:
    opened = io.BytesIO()
    writer = ExportWriter(opened, "0.1.0", 1e9, key)
    for each in ENTRIES:
        writer.add(each)
    writer.end()
    return opened.getvalue()


def test_a_signed_file_is_read_with_its_key_and_without() -> None:
    assert list(read(io.BytesIO(signed()), b"k" * 32)) == ENTRIES
    assert list(read(io.BytesIO(signed()))) == ENTRIES


def test_what_the_key_has_not_signed_is_refused() -> None:
    content = msgspec.msgpack.encode(msgspec.structs.replace(ENTRIES[0], value=b"other"))
    whole = msgspec.msgpack.encode(ENTRIES[0])
    forged = signed().replace(frame(whole), frame(content))  # with the right checksum
    assert forged != signed()
    cases = {"is not signed with this key": (forged, signed(b"x" * 32)), "it is not signed:": (file(),)}
    for told, files in cases.items():
        for each in files:
            with pytest.raises(UsageError, match=told):
                list(read(io.BytesIO(each), b"k" * 32))


def test_a_newer_format_is_named() -> None:
    newer = with_header(format=3, rannd="9.0", more=[1]) + b"whatever follows"
    with pytest.raises(UsageError, match=r"of format 3, written by rannd 9.0; this rannd reads format 2: update it"):
        list(read(io.BytesIO(newer)))


def test_a_header_may_have_more_fields() -> None:
    told = with_header(host="there") + frame(msgspec.msgpack.encode(End(0)))
    assert list(read(io.BytesIO(told))) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: told.update(kind="other"), "does not match its components"),
        (lambda told: told["components"].update(number="2"), "does not match its components"),
        (lambda told: told.update(key="0" * 40), "key 000000000000 does not match its components"),
        (lambda told: told.update(key="xyz"), "not a cache entry"),
        (lambda told: told.update(kind="No"), "not a cache entry"),
        (lambda told: told.update(components={"number": 1}), "not a cache entry"),
        (lambda told: told.update(value="text"), "not a cache entry"),
        (lambda told: told.update(size=protocol.MAX_VALUE + 1), "not a cache entry"),
        (lambda told: told.update(size=5), "a compressed value is damaged"),
        (lambda told: told.update(more=1), "not a cache entry"),
        (lambda told: told.pop("rannd"), "not a cache entry"),
        (lambda told: told.update(t="header"), "not a cache entry"),
        (lambda told: told.update(created=float("nan")), "not a cache entry"),
    ],
)
def test_an_entry_that_could_not_be_of_a_cache_is_refused(change: Callable[[dict[str, object]], object], said: str):
    with pytest.raises(UsageError, match=f"entry 1.*{said}"):
        list(read(io.BytesIO(with_entry(change))))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a cache export"),
        (b"PK\x03\x04" + bytes(100), "is not a cache export"),
        (export_file.MAGIC + b"\xff" * 100, "its header claims 4294967295 bytes"),
        (export_file.MAGIC + frame(b"\xc1"), "its header is invalid"),
        (export_file.MAGIC + frame(b"\x91" * 100_000), "its header is invalid"),
        (with_header() + frame(b"\x91" * 100_000), "entry 1 is not a cache entry"),
        (with_header() + frame(msgspec.msgpack.encode(End(3))), "contains 0 entries, but its end says 3"),
        (file() + b"x", "data after its end, after 3 entries"),
        (with_header(format=0), "its header is invalid"),
    ],
)
def test_what_is_no_export_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        list(read(io.BytesIO(content)))


def test_an_entry_above_the_limit_is_not_written() -> None:
    key = keys.make_key("trace", {"x": 1})
    large = Exported(key.digest, key.kind, key.components, "1", 0.0, 0, bytes(export_file.MAX_FRAME))
    with pytest.raises(UsageError, match="is above the limit of"):
        ExportWriter(io.BytesIO(), "1", 0.0).add(large)


def test_the_page_says_what_the_grammar_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "daemon.md").read_text()
    assert f"The format, {export_file.FORMAT}, " in page
    assert f"the line `{export_file.MAGIC.decode().rstrip()}`" in page
    for frame_type in (Header, Exported, End):
        (row,) = re.findall(rf"^\|.*`t` = `{frame_type.__struct_config__.tag}`.*$", page, re.M)
        assert re.findall(r"`(\w+)`(?=[,:( ]| \|)", row)[2:] == list(frame_type.__struct_fields__)
