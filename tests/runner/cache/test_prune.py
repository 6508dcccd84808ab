"""`rannc-cache prune`: the least recently used go first, what is leased stays."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import time
from collections.abc import Sequence

import pytest
from cache_command import BIN, PROFILES, cache, client
from thinned import one_in

from rannd.daemon.client.cache import Lease, connect
from rannd.daemon.common.keys import Key, make_key
from rannd.daemon.common.paths import places
from rannd.daemon.common.protocol import EntryInfo
from rannd.runner.cache.prune import excess, unused

DAY = 86400.0


def info(key: str, used: float, length: int = 10) -> EntryInfo:
    return EntryInfo(key, "profile", 2, "1", 0.0, used, 0, length, "", {"a": "1"})


@pytest.fixture
def filled(daemon_home) -> object:
    """Ten entries of 100 bytes, of which number N was last used N days ago."""
    with client() as job:
        assert job.put_many([(key, bytes(100)) for key in PROFILES[:10]]) == 10
    subprocess.run([str(BIN / "rannd"), "stop"], check=True, capture_output=True)
    store = sqlite3.connect(places().store)
    for number, key in enumerate(PROFILES[:10]):
        store.execute("UPDATE entries SET used = ? WHERE key = ?", (time.time() - number * DAY - 60, key.digest))
    store.commit()
    store.close()
    return daemon_home


def digests(keys: Sequence[Key]) -> list[str]:
    return [key.digest for key in keys]


def there() -> set[str]:
    return {entry["key"] for entry in json.loads(cache("ls", "--json").stdout)}


def removed(*words: str) -> list[str]:
    """What prune says it removes, in order; its last line says how much."""
    *lines, total = cache("prune", *words).stdout.splitlines()
    verb = "would remove" if "--dry-run" in words else "removed"
    assert total == f"{verb} {len(lines)} {'entry' if len(lines) == 1 else 'entries'}, {100 * len(lines)} B"
    assert all(line.startswith(f"{verb} profile ") for line in lines)
    return [line.removeprefix(f"{verb} profile ").split()[0] for line in lines]


@pytest.mark.parametrize(
    ("words", "stay"),
    one_in(
        3,
        [
            (("--max-size", "1KB"), 10),
            (("--max-size", "999B"), 9),
            (("--max-size", "400B"), 4),
            (("--max-size", "0"), 0),
            (("--older-than", "3d"), 3),
            (("--older-than", "2w"), 10),
            (("--older-than", "5d", "--max-size", "400B"), 4),
            (("--older-than", "3d", "--max-size", "400B"), 3),
        ],
    ),
)
def test_what_goes_and_what_a_dry_run_says(filled, words: tuple[str, ...], stay: int) -> None:
    gone = digests(PROFILES[stay:10][::-1])
    assert removed("--dry-run", *words) == gone
    assert [entry["key"] for entry in json.loads(cache("prune", "--dry-run", "--json", *words).stdout)] == gone
    assert there() == set(digests(PROFILES[:10])), "a dry run removes nothing"
    assert sorted(removed(*words)) == sorted(gone)
    assert there() == set(digests(PROFILES[:stay]))


def test_the_least_recently_used_go_first(filled) -> None:
    assert removed("--max-size", "700B") == digests([PROFILES[9], PROFILES[8], PROFILES[7]])
    told = json.loads(cache("prune", "--max-size", "500B", "--json").stdout)
    assert [entry["key"] for entry in told] == digests([PROFILES[6], PROFILES[5]])


@pytest.mark.parametrize("limit", [("--max-size", "0"), ("--older-than", "0s")])
def test_a_leased_entry_stays(filled, limit: tuple[str, str]) -> None:
    with connect(mode="refresh", timeout_s=60, idle_s=600, max_bytes=1 << 30) as job:
        lease = job.lease(PROFILES[9], 0)
        assert isinstance(lease, Lease)
        with lease:
            assert set(removed("--dry-run", *limit)) == set(digests(PROFILES[:9]))
            assert set(removed(*limit)) == set(digests(PROFILES[:9]))
            assert there() == {PROFILES[9].digest}


def test_many_entries(daemon_home) -> None:
    """More than one message of keys, and more than one page of removed ones."""
    with client() as job:
        keys = [make_key("trace", {"number": number}) for number in range(600)]
        assert job.put_many([(key, b"x") for key in keys]) == 600
    assert len(json.loads(cache("prune", "--older-than", "0s", "--dry-run", "--json").stdout)) == 600
    assert len(json.loads(cache("prune", "--older-than", "0s", "--json").stdout)) == 600
    assert there() == set()
    with client() as job:
        assert job.put_many([(key, b"x") for key in keys]) == 600
    assert len(json.loads(cache("prune", "--max-size", "100B", "--json").stdout)) == 500
    assert len(there()) == 100


def test_equal_ages_go_by_key() -> None:
    entries = [info("b", 1.0), info("c", 0.0), info("a", 1.0)]
    assert [entry.key for entry in excess(entries, 0, ())] == ["c", "a", "b"]
    assert [entry.key for entry in excess(entries, 20, ())] == ["c"]
    assert [entry.key for entry in excess(entries, 0, {"c"})] == ["a", "b"]
    assert [entry.key for entry in unused(entries, 0.5, ())] == ["c"]
    assert [entry.key for entry in unused(entries, 1.0, {"a"})] == ["c", "b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give --max-size, such as 2GB, or --older-than, such as 7d, or both"),
        (("--dry-run",), "give --max-size"),
        (("--max-size", "2"), "'2' is not a size"),
        (("--older-than", "7"), "'7' is not a time span"),
    ],
)
def test_wrong_use(daemon_home, words: tuple[str, ...], said: str) -> None:
    told = cache("prune", *words)
    assert (told.returncode, told.stdout) == (2, "")
    assert said in told.stderr
