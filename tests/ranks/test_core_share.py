"""Which cores a rank runs on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rannd.ranks import core_share
from rannd.ranks.core_share import CORES_VARIABLE, bind, share, unbind


def topology(tmp_path: Path, places: list[tuple[int, int]]) -> Path:
    """A machine: socket and physical core of each core."""
    for number, (socket, core) in enumerate(places):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{socket}\n")
        (folder / "core_id").write_text(f"{core}\n")
    return tmp_path


@pytest.mark.parametrize("parts", range(1, 9))
def test_parts_differ_by_one_core_at_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: int) -> None:
    monkeypatch.setattr(core_share, "_CORES", topology(tmp_path, [(0, number) for number in range(8)]))
    found = [share(range(8), number, parts) for number in range(parts)]
    assert sorted(core for each in found for core in each) == list(range(8))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_threads_of_a_core_and_cores_of_a_socket_stay_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # two sockets of two cores of two threads, numbered as Linux does: first all first threads
    places = [(number % 4 // 2, number % 2) for number in range(8)]
    monkeypatch.setattr(core_share, "_CORES", topology(tmp_path, places))
    assert [share(range(8), number, 2) for number in range(2)] == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert [share(range(8), number, 4) for number in range(4)] == [{0, 4}, {1, 5}, {2, 6}, {3, 7}]
    assert [share(range(8), number, 3) for number in range(3)] == [{0, 4}, {1, 5}, {2, 3, 6, 7}]
    assert [share({0, 1, 2, 4, 5, 6}, number, 2) for number in range(2)] == [{0, 4, 1}, {5, 2, 6}], "three threads each"
    assert [share(range(8), number, 8) for number in range(8)] == [{core} for core in (0, 4, 1, 5, 2, 6, 3, 7)]
    assert [share({1, 3, 5, 7}, number, 2) for number in range(2)] == [{1, 5}, {3, 7}], "the job's own cores"


@pytest.mark.parametrize(
    ("told", "rank", "ranks"),
    [
        ("", "0", "2"),
        ("7", "0", "2"),
        ("4", "0", ""),
        ("4", "x", "2"),
        ("4", "2", "2"),
        ("4", "0", "5"),
        ("all", "0", "2"),
    ],
    ids=[
        "not told",
        "another machine, or bound",
        "not known",
        "no number",
        "wrong",
        "more ranks than cores",
        "no cores",
    ],
)
def test_where_a_rank_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    told: str,
    rank: str,
    ranks: str,
) -> None:
    monkeypatch.setattr(core_share, "_CORES", topology(tmp_path, [(0, number) for number in range(4)]))
    bound: list[set[int]] = []
    monkeypatch.setattr(core_share, "_ACCELERATORS", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    environ = {CORES_VARIABLE: told, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    bind(environ)
    assert bound == []
    assert CORES_VARIABLE not in environ
    assert ("RANND_CORES='all' is no number" in capfd.readouterr().err) == (told == "all")
    unbind(environ)
    assert bound == []
    environ = {CORES_VARIABLE: "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    bind(environ)
    assert len(bound) == 1
    unbind(environ)
    assert set(bound[1]) == {0, 1, 2, 3}, "what it starts in the background"


def test_a_rank_that_cannot_be_bound_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(core_share, "_CORES", topology(tmp_path, [(0, number) for number in range(4)]))
    monkeypatch.setattr(core_share, "_ACCELERATORS", ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    environ = {CORES_VARIABLE: "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    bind(environ)
    assert "cannot be bound to its cores, it runs on all: not here" in capsys.readouterr().err
    unbind(environ)  # nothing to undo: it would raise


@pytest.mark.parametrize(("slow", "alike"), [(4_800_000, True), (3_900_000, False)])
def test_where_cores_are_not_alike_or_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: int, alike: bool
) -> None:
    topology(tmp_path, [(0, number) for number in range(4)])
    for core, speed in enumerate((5_000_000, 5_000_000, slow, slow)):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir()
        (folder / "cpuinfo_max_freq").write_text(f"{speed}\n")
    monkeypatch.setattr(core_share, "_CORES", tmp_path)
    monkeypatch.setattr(core_share, "_ACCELERATORS", ())
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores))
    told = {CORES_VARIABLE: "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    bind(dict(told))
    assert bool(bound) == alike
    bound.clear()
    monkeypatch.setattr(core_share, "_ACCELERATORS", (str(tmp_path),))
    bind(dict(told))
    assert bound == []
