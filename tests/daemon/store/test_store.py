"""What is stored comes back as it was, or not at all."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rannd.daemon.common import keys
from rannd.daemon.common.protocol import NewEntry
from rannd.daemon.store import compiled_folders
from rannd.daemon.store.entry_rows import FORMAT
from rannd.daemon.store.store import PAGE, Store
from rannd.errors import DaemonError

BIG = 1 << 30


def entry(number: int, value: bytes = b"value", kind: str = "trace") -> NewEntry:
    key = keys.make_key(kind, {"number": number})
    return NewEntry(key.digest, key.kind, key.components, value)


def opened(path: Path, max_bytes: int = BIG, busy_s: float = 5.0) -> Store:
    return Store(str(path / "s.sqlite"), max_bytes=max_bytes, busy_s=busy_s)


def got(store: Store, number: int) -> bytes | None:
    value = store.get(entry(number).key, "trace")
    return None if value is None else value.plain()


def test_values_survive_closing(tmp_path: Path) -> None:
    store = opened(tmp_path)
    values = {number: bytes([number]) * number * 1000 for number in range(20)}
    store.put([entry(number, value) for number, value in values.items()], "1.0")
    store.close()
    store = opened(tmp_path)
    for number, value in values.items():
        assert got(store, number) == value
    assert got(store, 99) is None
    assert store.size() == (20, sum(map(len, values.values())))
    store.close()


def test_an_entry_tells_what_it_is(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(1)], "1.2.3")
    got(store, 1)
    (info,), more = store.page()
    assert not more
    assert (info.kind, info.format, info.rannd, info.length, info.hits) == ("trace", FORMAT, "1.2.3", 5, 1)
    assert info.components == {"number": "1"}
    assert info.created <= info.used
    store.close()


def test_the_file_is_private(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    store.close()


def test_a_second_owner_is_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(DaemonError, match="held by another process"):
        opened(tmp_path, busy_s=0.0)
    store.put([entry(1)], "1")
    store.close()


def test_the_key_must_be_that_of_the_components(tmp_path: Path) -> None:
    store = opened(tmp_path)
    wrong = NewEntry(entry(1).key, "trace", entry(2).components, b"")
    with pytest.raises(DaemonError, match="components"):
        store.put([entry(3), wrong], "1")
    assert store.size() == (0, 0)
    store.close()


def test_every_flipped_byte_of_an_entry_is_a_miss(tmp_path: Path) -> None:
    """Each stored column in turn is changed behind the store's back."""
    changes = {
        "value": "zeroblob(5)",
        "components": "replace(components, '1', '2')",
        "checksum": "replace(checksum, substr(checksum, 1, 1), 'x')",
        "kind": "'tracf'",
        "format": "format + 1",
        "length": "length + 1",
        "created": "'not a number'",
        "rannd": "x'ff'",
    }
    for number, (column, changed) in enumerate(changes.items()):
        store = opened(tmp_path)
        store.put([entry(number, b"12345")], "1")
        store._db.sql.execute(f"UPDATE entries SET {column} = {changed}")
        assert got(store, number) is None, column
        assert store.statistics().corrupt == number + 1
        assert store._db.sql.execute("SELECT count(*) FROM set_aside").fetchone()[0] == number + 1
        store.put([entry(number, b"healed")], "1")
        assert got(store, number) == b"healed"
        store.clear()
        store.close()


def test_flipped_bytes_anywhere_in_the_file_never_give_a_wrong_value(tmp_path: Path) -> None:
    store = opened(tmp_path)
    values = {number: os.urandom(300) for number in range(30)}
    store.put([entry(number, value) for number, value in values.items()], "1")
    store.close()
    file = tmp_path / "s.sqlite"
    sound = file.read_bytes()
    missed = 0
    for position in range(0, len(sound), max(1, len(sound) // 150)):
        broken = bytearray(sound)
        broken[position] ^= 0x55
        file.write_bytes(broken)
        store = opened(tmp_path)
        for number, value in values.items():
            found = got(store, number)
            assert found in (None, value), position
            missed += found is None
        store.put([entry(77, b"still works")], "1")
        assert got(store, 77) == b"still works"
        store.close()
    assert missed > 0


@pytest.mark.parametrize("content", [b"this is no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_file_that_is_no_store_is_set_aside(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.sqlite").write_bytes(content)
    store = opened(tmp_path)
    store.put([entry(1)], "1")
    assert got(store, 1) == b"value"
    assert store.statistics().corrupt == 1
    store.close()
    assert (tmp_path / "s.sqlite.corrupt").read_bytes() == content


def test_verify_finds_what_is_corrupt_page_by_page(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(number) for number in range(50)], "1")
    bad = sorted([entry(3).key, entry(44).key])
    store._db.sql.execute("UPDATE entries SET value = x'00' WHERE key IN (?, ?)", bad)
    sound, corrupt, after = 0, list[str](), ""
    while True:
        page = store.verify(after)
        sound += page[0]
        corrupt += page[1]
        if page[2] is None:
            break
        after = page[2]
    assert (sound, corrupt) == (48, bad)
    assert store.size()[0] == 48
    store.close()


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=10_000)
    for number in range(10):
        store.put([entry(number, bytes(1000))], "1")
    got(store, 0)
    store.put([entry(10, bytes(1000))], "1")
    kept = {number for number in range(11) if got(store, number) is not None}
    assert kept == set(range(11)) - {1}
    assert store.statistics().evicted == 1
    store.close()


def test_what_is_leased_stays(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=3_000)
    store.put([entry(number, bytes(1000)) for number in range(3)], "1")
    store.put([entry(3, bytes(1000))], "1", keep={entry(0).key})
    assert got(store, 0) is not None
    store.close()


def test_a_value_above_the_limit_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=3_000)
    store.put([entry(1, bytes(2000))], "1")
    with pytest.raises(DaemonError, match="cache_max_gb"):
        store.put([entry(2, bytes(3001))], "1")
    assert got(store, 1) is not None
    store.close()


def test_removed_entries_give_their_space_back(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(number, bytes(1_000_000)) for number in range(10)], "1")
    store.clear()
    store.close()
    assert (tmp_path / "s.sqlite").stat().st_size < 1_000_000


def test_clear_matches_everything_given(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(1), entry(2), entry(1, kind="link")], "1")
    store._db.sql.execute("UPDATE entries SET used = used - 1000 WHERE key = ?", (entry(1).key,))
    assert store.clear(kind="profile")[0] == []
    assert [info.key for info in store.clear(older_than_s=500)[0]] == [entry(1).key]
    assert store.clear(keys=[entry(2).key[:8]], kind="link")[0] == []
    assert [info.key for info in store.clear(keys=[entry(2).key[:8]])[0]] == [entry(2).key]
    assert store.clear(keys=[])[0] == [], "no key is not every key"
    assert [info.kind for info in store.clear()[0]] == ["link"]
    assert store.statistics().removed == 3
    store.close()


def test_pages_cover_everything_once(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(number) for number in range(2 * PAGE + 5)], "1")
    seen, after, more = list[str](), "", True
    while more:
        page, more = store.page(after=after)
        seen += [info.key for info in page]
        after = seen[-1]
    assert seen == sorted(entry(number).key for number in range(2 * PAGE + 5))
    assert [info.key for info in store.page(prefix=seen[7])[0]] == [seen[7]]
    store.close()


def test_statistics_survive(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(1)], "1")
    got(store, 1)
    got(store, 2)
    store.discard(entry(1).key, "out of memory")
    assert got(store, 1) is None
    store.close()
    store = opened(tmp_path)
    counted = store.statistics()
    assert (counted.hits, counted.misses, counted.stored, counted.discarded) == (1, 2, 1, 1)
    assert tuple(store._db.sql.execute("SELECT key, reason FROM set_aside").fetchone()) == (
        entry(1).key,
        "out of memory",
    )
    store.close()


def test_a_full_disk_refuses_and_keeps_what_is_there(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(1)], "1")
    pages = store._db.sql.execute("PRAGMA page_count").fetchone()[0]
    store._db.sql.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite's own way to a full disk
    with pytest.raises(DaemonError, match="full"):
        store.put([entry(2, bytes(1_000_000))], "1")
    assert got(store, 1) == b"value"
    assert got(store, 2) is None
    store.close()


def test_network_filesystems_get_no_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rannd.daemon.store.database.on_network", lambda path: True)
    store = opened(tmp_path)
    store.put([entry(1)], "1")
    assert not list(tmp_path.glob("*-wal"))
    assert not list(tmp_path.glob("*-shm"))
    assert store._db.sql.execute("PRAGMA synchronous").fetchone()[0] == 2
    store.close()
    monkeypatch.undo()
    store = opened(tmp_path)
    assert list(tmp_path.glob("*-wal"))
    assert not list(tmp_path.glob("*-shm")), "an exclusive owner needs no shared memory"
    assert got(store, 1) == b"value"
    store.close()


WRITER = """
import sys
from rannd.daemon.common import keys
from rannd.daemon.common.protocol import NewEntry
from rannd.daemon.store.store import Store
store = Store(sys.argv[1], max_bytes=1 << 30)
for number in range(10_000):
    key = keys.make_key("trace", {"number": number})
    store.put([NewEntry(key.digest, key.kind, key.components, bytes([number % 256]) * 20_000)], "1")
    print(number, flush=True)
"""


def test_what_is_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    file = tmp_path / "s.sqlite"
    for round_ in range(5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(7 + 11 * round_):
                acknowledged = int(writer.stdout.readline())
            writer.kill()
            rest = writer.stdout.read().split(b"\n")[:-1]
        acknowledged = max([acknowledged, *map(int, rest)])
        store = opened(tmp_path)
        for number in range(acknowledged + 1):
            assert got(store, number) == bytes([number % 256]) * 20_000
        assert store.statistics().corrupt == 0
        store.close()


def test_the_sqlite_file_is_readable_with_standard_tools(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(1)], "1")
    store.close()
    database = sqlite3.connect(tmp_path / "s.sqlite")
    assert database.execute("SELECT kind, components FROM entries").fetchall() == [("trace", '{"number": "1"}')]
    database.close()


def test_entries_that_cannot_be_described_are_removed_like_others(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(number) for number in range(PAGE * 2 + 10)], "1")
    store._db.sql.execute(
        "UPDATE entries SET components = '{' WHERE key IN (SELECT key FROM entries ORDER BY key LIMIT ?)", (PAGE,)
    )
    assert store.clear() == ([], True), "those of the first page"
    assert [len(store.clear()[0]) for _ in range(2)] == [PAGE, 10]
    assert store.size() == (0, 0)
    store.close()


def test_to_look_is_no_use(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put([entry(1)], "1")
    (before,), _ = store.page()
    assert store.get(entry(1).key, "trace", peek=True) is not None
    assert store.get(entry(2).key, "trace", peek=True) is None
    assert store.page() == ([before], False)
    assert (store.statistics().hits, store.statistics().misses) == (0, 0)
    store.close()


def test_a_page_of_long_components_fits_into_a_message(tmp_path: Path) -> None:
    """A client hangs up on what is longer, and then could neither list nor clear."""
    store = opened(tmp_path)
    text = "x" * (1 << 20)
    for number in range(6):
        texts = {"number": str(number), **{f"name{at}": text for at in range(7)}}
        store.put([NewEntry(keys.digest_of("trace", texts), "trace", texts, b"value")], "1.0")
    first, more = store.page()
    assert (len(first), more) == (2, True)
    second, _ = store.page(after=first[-1].key)
    assert second[0].key > first[-1].key
    removed, more = store.clear()
    assert (len(removed), more) == (2, True)
    removed, more = store.prune(0)
    assert (len(removed), more) == (2, True)
    assert [len(store.prune(0)[0]), store.size()] == [2, (0, 0)]
    store.close()


def compiled(store: Store, path: Path, number: int, size: int) -> Path:
    """Enter a folder of compiled code."""
    made = entry(number, str(size).encode(), "compiled")
    folder = path / "compiled" / made.key
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "code").write_bytes(b"x" * size)
    store.put([made], "1.0")
    return folder


def test_folders_of_compiled_code_count_and_go_with_their_entries(tmp_path: Path) -> None:
    store = opened(tmp_path, max_bytes=10_000)
    folders = [compiled(store, tmp_path, number, 3000) for number in range(3)]
    assert store.size() == (3, 3 * 3004)
    assert {info.length for info in store.page()[0]} == {3004}
    store.get(entry(0, kind="compiled").key, "compiled")
    folders.append(compiled(store, tmp_path, 3, 3000))
    assert [folder.exists() for folder in folders] == [True, False, True, True], "the least recently used one"
    removed, _ = store.prune(7000)
    assert [info.length for info in removed] == [3004]
    assert [folder.exists() for folder in folders] == [True, False, False, True]
    store.discard(entry(0, kind="compiled").key, "it is wrong")
    store.clear(kind="compiled")
    assert not any(folder.exists() for folder in folders)
    store.close()


def test_a_compiled_entry_cannot_name_other_folders(tmp_path: Path) -> None:
    (tmp_path / "compiled").mkdir()
    (tmp_path / "precious").mkdir()
    compiled_folders.remove(str(tmp_path / "compiled"), ["../precious", "", ".", None, "A" * 40])
    assert (tmp_path / "precious").is_dir()
    assert (tmp_path / "compiled").is_dir()


def test_folders_that_nobody_has_entered_go_after_a_day(tmp_path: Path) -> None:
    store = opened(tmp_path)
    kept = compiled(store, tmp_path, 1, 10)
    left, young = tmp_path / "compiled" / ("0" * 40), tmp_path / "compiled" / f".{'1' * 40}.77"
    for folder in (left, young):
        folder.mkdir()
    for folder in (kept, left):
        os.utime(folder, (0, 0))
    store.close()
    opened(tmp_path).close()
    assert [folder.exists() for folder in (kept, left, young)] == [True, False, True]
