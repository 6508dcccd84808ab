"""Large values are compressed, and come back as they were or not at all."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from rannd.daemon.client.cache import connect
from rannd.daemon.common import keys, protocol
from rannd.daemon.common.compression import PackedValue, pack
from rannd.daemon.common.protocol import COMPRESSED, MAX_VALUE, NewEntry
from rannd.daemon.store.store import Store
from rannd.errors import ProtocolError

TEXT = b"(torch.ops.aten.linear.default, %x, %weight)" * (COMPRESSED // 20)


def test_only_large_values_that_get_smaller_are_compressed() -> None:
    assert pack(TEXT[:COMPRESSED]) == PackedValue(TEXT[:COMPRESSED])
    noise = os.urandom(COMPRESSED + 1)
    assert pack(noise) == PackedValue(noise)
    packed = pack(TEXT)
    assert packed.size == len(TEXT)
    assert len(packed.data) < len(TEXT) / 10
    assert packed.plain() == TEXT


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (PackedValue(b"no zlib at all", 100), "damaged"),
        (PackedValue(zlib.compress(TEXT), len(TEXT) + 1), "does not have the"),
        (
            PackedValue(zlib.compress(bytes(MAX_VALUE)), 1000),
            "does not have the 1000 bytes",
        ),  # it claims little, and is a bomb
        (PackedValue(zlib.compress(TEXT)[:-10], len(TEXT)), "does not have the"),
        (PackedValue(b"", MAX_VALUE + 1), "are allowed"),
    ],
)
def test_what_is_not_what_it_claims_is_an_error(value: PackedValue, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        value.plain()


def test_a_large_value_takes_little_room(daemon_home) -> None:
    key = keys.make_key("trace", {"number": 1})
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
        assert client.put(key, TEXT)
        assert client.get(key) == TEXT
        assert client.lease(key, 0) == TEXT
        assert client._session is not None
        (entry,) = client._session.entries()
        assert (entry.size, entry.length) == (len(TEXT), len(pack(TEXT).data))
        assert client._session.state().bytes == entry.length


def test_a_damaged_one_is_a_miss_with_a_warning(daemon_home, caplog: pytest.LogCaptureFixture) -> None:
    """A checksum cannot see what was wrong before it was stored."""

    key = keys.make_key("trace", {"number": 1})
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
        assert client._session is not None
        bad = NewEntry(key.digest, key.kind, key.components, b"no zlib", 5000)
        client._session.ask(protocol.Put("1", [bad]), protocol.Done)
        assert client.get_many([key, key]) == [None, None]
    assert [record.levelname for record in caplog.records if "compressed value" in record.getMessage()] == ["WARNING"]


def test_the_size_is_under_the_checksum(tmp_path: Path) -> None:

    store = Store(str(tmp_path / "s.sqlite"), max_bytes=1 << 30)
    key, packed = keys.make_key("trace", {"number": 1}), pack(TEXT)
    store.put([NewEntry(key.digest, key.kind, key.components, packed.data, packed.size)], "1")
    store._db.sql.execute("UPDATE entries SET size = size + 1")
    assert store.get(key.digest, "trace") is None
    assert store.statistics().corrupt == 1
    store.close()
