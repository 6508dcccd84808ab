"""The store when the world around it changes: files taken away, disks that fill, clocks that jump, newer versions."""

from __future__ import annotations

import os
import select
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from other_rannd import RUN, copy_of, run

from rannd.daemon.client import request_channel, spawn
from rannd.daemon.client.cache import Client, Lease, connect
from rannd.daemon.common import keys, protocol
from rannd.daemon.common.paths import places
from rannd.daemon.common.protocol import NewEntry
from rannd.daemon.store.database import PLAUSIBLE
from rannd.daemon.store.entry_rows import FORMAT
from rannd.daemon.store.store import Store
from rannd.errors import DaemonError

YEAR = 365 * 86400.0


def key(number: int) -> keys.Key:
    return keys.make_key("trace", {"number": number})


def entry(number: int, value: bytes = b"value") -> NewEntry:
    return NewEntry(key(number).digest, "trace", key(number).components, value)


def got(store: Store, number: int) -> bytes | None:
    value = store.get(key(number).digest, "trace")
    return None if value is None else value.plain()


# -- taken away ----------------------------------------------------------------------------------------------------


@pytest.fixture
def client(daemon_home) -> Iterator[Client]:
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as connected:
        assert connected.put(key(0), b"before")
        yield connected


def state() -> protocol.State:
    reply = request_channel.ask(places().socket, protocol.Status(), time.monotonic() + 60)
    assert isinstance(reply, protocol.State)
    return reply


def the_file() -> None:
    Path(places().store).unlink()


def the_file_and_its_journal() -> None:
    for path in Path(places().cache).iterdir():
        path.unlink()


def the_journal() -> None:
    Path(places().store + "-wal").unlink()


def the_directory() -> None:
    shutil.rmtree(places().cache)


def the_whole_cache() -> None:
    shutil.rmtree(os.environ["XDG_CACHE_HOME"])


def the_file_for_another() -> None:
    Path(places().store).rename(places().store + ".old")
    Path(places().store).write_bytes(b"no database at all" * 1000)


@pytest.mark.parametrize(
    "loss",
    [the_file, the_file_and_its_journal, the_journal, the_directory, the_whole_cache, the_file_for_another],
    ids=lambda loss: loss.__name__,
)
def test_what_is_put_after_a_loss_is_found_and_survives_a_restart(
    client: Client, daemon_home, loss: Callable[[], None]
) -> None:
    (pid,) = daemon_home.pids()
    loss()
    assert client.get(key(0)) in (None, b"before")
    client.put(key(1), b"first")  # the one that finds out may be lost, and says so
    assert client.put(key(2), b"after")
    assert client.get(key(2)) == b"after"
    assert daemon_home.pids() == [pid]
    assert spawn.stop(places(), "test", time.monotonic() + 60)
    assert client.get(key(2)) == b"after"
    assert daemon_home.pids() != [pid]
    assert client.connected


def in_the_way(home) -> None:
    shutil.rmtree(home.cache)
    home.cache.write_text("a file is in the way, for root too")


def test_a_daemon_that_cannot_write_lives_on_and_goes_on_when_it_can(client: Client, daemon_home) -> None:
    (pid,) = daemon_home.pids()
    client.get(key(0))  # a last-use time waits to be written when nothing comes any more
    in_the_way(daemon_home)
    watch = os.pidfd_open(pid)
    assert not select.select([watch], [], [], 1.5)[0], "it ends when it has nothing to do"
    os.close(watch)
    assert client.get(key(0)) is None
    assert not client.put(key(1), b"x")
    lease = client.lease(key(1), 0)
    assert lease is None or isinstance(lease, Lease)
    assert client.connected, "the daemon is well"
    assert client._session is not None
    state = client._session.state()
    assert (state.pid, state.entries) == (pid, 0)
    assert "cannot be" in state.errors[-1].text
    daemon_home.cache.unlink()
    assert client.put(key(1), b"x")
    assert client.get(key(1)) == b"x"
    assert daemon_home.pids() == [pid]


def test_a_store_that_could_not_be_begun_is_begun_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full just when the file was taken away leaves an empty file, which must not stay half a store."""
    store = Store(str(tmp_path / "s.sqlite"), max_bytes=1 << 30)
    (tmp_path / "s.sqlite").unlink()
    with monkeypatch.context() as patch:
        # SQLite's own way to a full disk, in place of the first statement that writes
        patch.setattr(store._db, "_schema", "PRAGMA max_page_count = 1; CREATE TABLE x (y); CREATE TABLE z (y)")
        with pytest.raises(DaemonError, match="full"):
            store.put([entry(1)], "1")
        with pytest.raises(DaemonError, match="full"):
            got(store, 1)
    store.put([entry(1)], "1")
    assert got(store, 1) == b"value"
    store.close()


LIMITED = """
import os, resource
from rannd.daemon.common import keys
from rannd.daemon.client.cache import connect
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))  # the daemon inherits it

def key(number):
    return keys.make_key("trace", {"number": number})

with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
    print(client.put(key(0), b"before"))
    print([client.put(key(number), os.urandom(500_000)) for number in (1, 2)])
    print([client.get(key(number)) for number in range(3)], client.connected)
    client.discard(key(0), "to make room")
    print(client.put(key(3), b"after"), client.get(key(3)))
"""


def test_a_file_that_may_not_grow_refuses_what_is_too_much_and_nothing_else(daemon_home) -> None:
    """What a quota does to a real daemon."""
    done = run({}, LIMITED)
    assert done.stdout.splitlines() == ["True", "[False, False]", "[b'before', None, None] True", "True b'after'"]
    (told,) = done.stderr.splitlines()
    assert "cannot be written" in told
    assert len(daemon_home.pids()) == 1


def test_a_runtime_directory_that_is_taken_away_is_no_end(daemon_home, tmp_path: Path) -> None:
    """As a cleaner of /tmp does: whom nobody finds any more leaves, and gives the store to the next one."""
    assert run(copy_of(tmp_path, {"CHECK_S = 10.0": "CHECK_S = 0.2"}), RUN, "start").returncode == 0
    (pid,) = daemon_home.pids()
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as first:
        assert first.put(key(1), b"x")
        watch = os.pidfd_open(pid)
        shutil.rmtree(daemon_home.runtime / "rannd")
        assert select.select([watch], [], [], 60)[0]
        os.close(watch)
        assert first.get(key(1)) in (None, b"x")
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as second:
        assert second.get(key(1)) == b"x"


# -- other versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", ["DELETE", "WAL"])
def test_a_newer_store_is_refused_and_not_touched(tmp_path: Path, journal: str) -> None:
    file = tmp_path / "s.sqlite"
    newer = sqlite3.connect(file)
    newer.execute(f"PRAGMA journal_mode = {journal}")
    newer.execute(f"PRAGMA user_version = {FORMAT + 1}")
    newer.execute("CREATE TABLE entries (other TEXT)")
    newer.close()
    before = file.read_bytes()
    with pytest.raises(DaemonError, match=rf"format {FORMAT + 1}, which a newer rannd wrote.*XDG_CACHE_HOME"):
        Store(str(file), max_bytes=1 << 30)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["s.sqlite"]


@pytest.mark.parametrize("version", [FORMAT + PLAUSIBLE + 1, 2**31 - 1, -1])
def test_a_format_that_there_cannot_be_is_corrupt(tmp_path: Path, version: int) -> None:
    file = tmp_path / "s.sqlite"
    wrong = sqlite3.connect(file)
    wrong.execute(f"PRAGMA user_version = {version}")
    wrong.execute("CREATE TABLE entries (other TEXT)")
    wrong.close()
    before = file.read_bytes()
    store = Store(str(file), max_bytes=1 << 30)
    store.put([entry(1)], "1")
    assert got(store, 1) == b"value"
    assert store.statistics().corrupt == 1
    store.close()
    assert (tmp_path / "s.sqlite.corrupt").read_bytes() == before


# -- clocks --------------------------------------------------------------------------------------------------------


class Clock:
    """time.time of the store, that many seconds off."""

    def __init__(self) -> None:
        self.off = 0.0
        self._time = time.time

    def __call__(self) -> float:
        return self._time() + self.off


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("rannd.daemon.store.store.time.time", made)
    return made


@pytest.mark.parametrize("jump", [YEAR, -YEAR])
def test_entries_are_found_and_of_an_age_after_a_jump(tmp_path: Path, clock: Clock, jump: float) -> None:
    store = Store(str(tmp_path / "s.sqlite"), max_bytes=1 << 30)
    store.put([entry(number) for number in range(3)], "1")
    clock.off = jump
    assert got(store, 1) == b"value"
    store.put([entry(3)], "1")
    found = [got(store, number) for number in range(4)]
    assert found == [b"value"] * 4
    infos, _ = store.page()
    assert all(info.created <= info.used <= clock() for info in infos)
    assert store.clear(older_than_s=3600)[0] == [], "all have just been used"
    store.close()


def test_a_clock_set_back_keeps_the_order_of_use(tmp_path: Path, clock: Clock) -> None:
    """Entries of a future that never came would outlive all that is used from now on."""
    store = Store(str(tmp_path / "s.sqlite"), max_bytes=5000)
    clock.off = YEAR
    for number in (3, 1, 2):
        store.put([entry(number, bytes(1000))], "1")
    got(store, 3)
    clock.off = 0.0
    for number in (4, 5):
        store.put([entry(number, bytes(1000))], "1")
    assert store.size()[0] == 5
    for number, gone in ((6, 1), (7, 2), (8, 3), (9, 4)):
        store.put([entry(number, bytes(1000))], "1")
        assert {info.key for info in store.page()[0]}.isdisjoint({key(gone).digest})
    assert sorted(info.key for info in store.page()[0]) == sorted(key(number).digest for number in range(5, 10))
    store.close()


def test_a_clock_set_back_while_no_daemon_ran(tmp_path: Path, clock: Clock) -> None:
    clock.off = YEAR
    store = Store(str(tmp_path / "s.sqlite"), max_bytes=1 << 30)
    store.put([entry(1), entry(2)], "1")
    store.close()
    clock.off = 0.0
    store = Store(str(tmp_path / "s.sqlite"), max_bytes=1 << 30)
    assert all(info.created <= info.used <= clock() for info in store.page()[0])
    assert store.clear(older_than_s=3600)[0] == []
    assert len(store.clear(older_than_s=1)[0]) == 2
    store.close()


def test_refresh_takes_nothing_from_a_future_that_never_came(tmp_path: Path, clock: Clock) -> None:
    store = Store(str(tmp_path / "s.sqlite"), max_bytes=1 << 30)
    clock.off = YEAR
    store.put([entry(1)], "1")
    clock.off = 0.0
    asked = clock()
    assert not store.stored_since(key(1).digest, asked)
    store.put([entry(1)], "1")
    assert store.stored_since(key(1).digest, asked)
    store.close()
