"""`rannc-cache export` and `import`: what leaves one cache arrives in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cache_command import PROFILES, cache, client, deployment

from rannd.daemon.cli_common import configured_session
from rannd.daemon.common import protocol
from rannd.daemon.common.keys import Key, make_key
from rannd.runner.cache import export_file

TRACE = make_key("trace", {"x": 1})
VALUES = [
    (deployment(64), b"plan"),
    (PROFILES[0], b""),
    (PROFILES[1], os.urandom(1000)),
    (TRACE, b"compressible " * (protocol.COMPRESSED // 10)),
]


@pytest.fixture
def file(daemon_home, tmp_path: Path) -> Path:
    """An export of four entries; the cache holds none any more."""
    fill(VALUES)
    made = tmp_path / "cache.rannd"
    told = cache("export", str(made))
    assert told.returncode == 0
    assert told.stdout.startswith("exported 4 entries, ")
    assert told.stdout.endswith(f", to {made}\n")
    cache("clear")
    return made


def fill(values: Sequence[tuple[Key, bytes]]) -> None:
    with client() as job:
        assert job.put_many(values) == len(values)


def held(keys: list[Key]) -> list[bytes | None]:
    with client() as job:
        return job.get_many(keys)


def imported(file: Path, *words: str) -> dict[str, int]:
    told = cache("import", str(file), "--json", *words)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def exported(*words: str, to: Path) -> set[str]:
    assert cache("export", str(to), *words).returncode == 0
    with to.open("rb") as opened:
        return {entry.key for entry in export_file.read(opened)}


def test_all_comes_back(file: Path) -> None:
    assert held([key for key, _ in VALUES]) == [None] * 4
    assert cache("import", str(file)).stdout == "4 entries new, 0 existed already, 0 skipped\n"
    assert held([key for key, _ in VALUES]) == [value for _, value in VALUES]
    told = {entry["key"]: entry for entry in json.loads(cache("ls", "--json").stdout)}
    assert told[deployment(64).digest]["components"] == deployment(64).components
    trace = told[TRACE.digest]
    assert trace["length"] < trace["size"], "compressed as it was"
    assert cache("verify").returncode == 0


def test_what_is_there_stays_unless_it_may_be_overwritten(file: Path) -> None:
    fill([(deployment(64), b"mine")])
    assert imported(file) == {"new": 3, "there": 1, "replaced": 0, "skipped": 0}
    assert held([deployment(64)]) == [b"mine"]
    assert imported(file) == {"new": 0, "there": 4, "replaced": 0, "skipped": 0}
    told = cache("import", str(file), "--overwrite").stdout
    assert told == "0 entries new, 0 existed already, 4 replaced, 0 skipped\n"
    assert held([deployment(64)]) == [b"plan"]


def test_the_version_that_made_a_value_stays_known(daemon_home, tmp_path: Path) -> None:
    file = tmp_path / "old"
    with file.open("wb") as opened:
        writer = export_file.ExportWriter(opened, "0.1.0", 1e9)
        for number, rannd in enumerate(("0.0.1", "0.0.1", "0.0.2")):
            key = make_key("trace", {"number": number})
            writer.add(export_file.Exported(key.digest, key.kind, key.components, rannd, 1e9, 0, b"x"))
        writer.end()
    assert imported(file)["new"] == 3
    assert sorted(entry["rannd"] for entry in json.loads(cache("ls", "--json").stdout)) == ["0.0.1", "0.0.1", "0.0.2"]


def test_an_export_can_be_of_some_entries(daemon_home, tmp_path: Path) -> None:
    fill(VALUES)
    assert exported("--kind", "profile", to=tmp_path / "a") == {PROFILES[0].digest, PROFILES[1].digest}
    assert exported(PROFILES[1].short, deployment(64).short, to=tmp_path / "b") == {
        PROFILES[1].digest,
        deployment(64).digest,
    }
    assert exported(PROFILES[1].short, "--kind", "deployment", to=tmp_path / "c") == set()
    unknown = cache("export", str(tmp_path / "d"), "0" * 40)
    assert unknown.returncode == 2
    assert "nothing is exported" in unknown.stderr
    assert not (tmp_path / "d").exists()
    told = json.loads(cache("export", str(tmp_path / "a"), PROFILES[1].short, "--json").stdout)
    assert told == {"file": str(tmp_path / "a"), "entries": 1, "bytes": 1000}


def test_an_export_is_private_and_never_written_through_a_link(daemon_home, tmp_path: Path) -> None:
    fill(VALUES)
    file, link = tmp_path / "file", tmp_path / "link"
    assert cache("export", str(file)).returncode == 0
    assert file.stat().st_mode & 0o777 == 0o600
    before = file.read_bytes()
    link.symlink_to(file)
    told = cache("export", str(link))
    assert told.returncode == 2
    assert f"the cache export is not written to {link}, a symbolic link to {file}" in told.stderr
    assert file.read_bytes() == before
    assert cache("import", str(link)).returncode == 2
    assert sorted(tmp_path.iterdir()) == [file, link], "no draft stays"
    assert "name a file in an existing folder" in cache("export", str(tmp_path / "no" / "file")).stderr


def test_a_file_that_everybody_can_change_is_refused(file: Path) -> None:
    file.chmod(0o666)
    told = cache("import", str(file))
    assert told.returncode == 2
    assert "is writable for every user" in told.stderr
    assert held([deployment(64)]) == [None]


def test_a_signed_export_is_verified_before_anything_is_stored(file: Path, tmp_path: Path) -> None:
    key, other = tmp_path / "key", tmp_path / "other"
    for each in (key, other):
        each.write_bytes(os.urandom(32))
        each.chmod(0o600)
    assert imported(file)["new"] == 4
    made = tmp_path / "signed"
    assert cache("export", str(made), "--sign", str(key)).returncode == 0
    cache("clear")
    for refused, told in ((file, "it is not signed"), (made, "is not signed with this key")):
        found = cache("import", str(refused), "--verify", str(other))
        assert found.returncode == 2
        assert told in found.stderr
    assert json.loads(cache("ls", "--json").stdout) == []
    assert imported(made, "--verify", str(key))["new"] == 4


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [
        (b"k" * 32, 0o640, "can be read or changed by other users"),
        (b"short", 0o600, "has 5 bytes, a key has at least 16"),
    ],
)
def test_a_key_that_is_no_secret_is_refused(tmp_path: Path, content: bytes, mode: int, told: str) -> None:
    key = tmp_path / "key"
    key.write_bytes(content)
    key.chmod(mode)
    found = cache("export", str(tmp_path / "made"), "--sign", str(key))
    assert found.returncode == 2
    assert told in found.stderr
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "garbage"])
def test_of_a_damaged_file_nothing_is_imported(file: Path, damage: str) -> None:
    whole = file.read_bytes()
    flipped = whole[:-30] + bytes([whole[-30] ^ 1]) + whole[-29:]
    file.write_bytes({"flip": flipped, "cut": whole[:-5], "garbage": b"garbage" * 100}[damage])
    told = cache("import", str(file))
    assert (told.returncode, told.stdout) == (2, "")
    assert f"rannc-cache: {file}: " in told.stderr
    assert "Traceback" not in told.stderr
    assert json.loads(cache("ls", "--json").stdout) == []


def test_damage_after_what_one_message_holds(daemon_home, tmp_path: Path) -> None:
    file = tmp_path / "file"
    fill([(make_key("trace", {"number": number}), b"x") for number in range(2 * protocol.MAX_BATCH)])
    cache("export", str(file))
    cache("clear")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert cache("import", str(file)).returncode == 2
    assert json.loads(cache("ls", "--json").stdout) == []


def test_what_is_larger_than_the_cache_is_skipped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CACHE_MAX_GB", "4e-7")  # 429 bytes
    told = cache("import", str(file)).stdout.splitlines()
    assert told[0] == "2 entries new, 0 existed already, 2 skipped"
    assert told[1] == "skipped: larger than the whole cache, 429 B; raise cache_max_gb"


def test_what_had_to_go_to_make_room_is_told(daemon_home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    fill([(key, bytes(100)) for key in PROFILES[:5]])
    cache("export", str(file))
    cache("clear")
    fill([(key, bytes(100)) for key in PROFILES[5:10]])
    monkeypatch.setenv("RANNC_CACHE_MAX_GB", "5e-7")  # 536 bytes
    assert cache("import", str(file)).stdout.splitlines() == [
        "5 entries new, 0 existed already, 0 skipped",
        "5 entries evicted to make room; raise cache_max_gb to keep more",
    ]


def test_more_entries_than_a_message_holds(daemon_home, tmp_path: Path) -> None:
    items = [(make_key("trace", {"number": number}), b"%d" % number) for number in range(2 * protocol.MAX_BATCH + 1)]
    fill(items)
    file = tmp_path / "many"
    assert exported(to=file) == {key.digest for key, _ in items}
    cache("clear")
    assert imported(file)["new"] == len(items)
    assert held([key for key, _ in items]) == [value for _, value in items]


def test_values_that_went_away_are_none(daemon_home) -> None:
    """Entries may go between the listing and the question for their values."""
    fill(VALUES)
    session = configured_session()
    entries = list(session.entries())
    gone = next(entry for entry in entries if entry.key == PROFILES[1].digest)
    session.clear(keys=[gone.key])
    values = dict(zip((entry.key for entry in entries), session.values(entries), strict=True))
    assert values.pop(gone.key) is None
    assert {key: value.plain() for key, value in values.items() if value is not None} == {
        key.digest: value for key, value in VALUES if key.digest != gone.key
    }


PEAK = """
import re, sys
from pathlib import Path
from rannd.runner.cache.cache_command import main
main(sys.argv[1:], standalone_mode=False)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.long
def test_a_large_cache_needs_little_memory(daemon_home, tmp_path: Path) -> None:
    """192 MiB of values through commands that never had more than 176 MiB in memory."""
    file = tmp_path / "large"
    for number in range(12):
        fill([(make_key("trace", {"number": number}), os.urandom(16 << 20))])
    for words in (("export", str(file)), ("import", str(file), "--overwrite")):
        told = subprocess.check_output([sys.executable, "-c", PEAK, *words], text=True)
        assert int(told.splitlines()[-1]) << 10 < 176 << 20
    assert file.stat().st_size > 192 << 20


def test_compiled_code_neither_leaves_nor_enters(daemon_home, tmp_path: Path) -> None:
    """Its files are code, which torch unpickles."""
    code = make_key("compiled", {"block": "x"})
    fill([(TRACE, b"trace"), (code, b"1000")])
    made = tmp_path / "cache.rannd"
    assert exported(to=made) == {TRACE.digest}
    with made.open("wb") as opened:
        writer = export_file.ExportWriter(opened, "0.1.0", 1e9)
        writer.add(export_file.Exported(code.digest, code.kind, code.components, "0.1.0", 1e9, 0, b"1000"))
        writer.end()
    told = cache("import", str(made))
    assert told.returncode == 2
    assert "is compiled code, which is never taken from another cache" in told.stderr
