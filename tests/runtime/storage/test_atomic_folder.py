"""A folder is there whole or not at all, whoever looks, saves or dies meanwhile."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from rannd.runtime.storage import atomic_folder
from rannd.runtime.storage.atomic_folder import BEFORE, Draft, UnsyncedError, recover


def draft(place: Path, text: str) -> Draft:
    made = Draft(place, "marker")
    (made.folder / "marker").write_text(text)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a checkpoint, on a file system that cannot exchange two names."""
    monkeypatch.setattr(atomic_folder, "exchange", lambda one, other: False)
    draft(tmp_path / "c", "old").finish()
    return tmp_path / "c"


def test_recovery_waits_for_a_living_writer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It put the old folder back, and the writer failed: 'Directory not empty'."""
    saver = draft(place, "new")
    rename = os.rename
    waits = threading.Event()
    seen: list[str] = []

    def wait(seconds: float) -> None:
        waits.set()

    def load() -> None:
        recover(place)
        seen.append((place / "marker").read_text())

    def between(source: Path, target: Path) -> None:
        rename(source, target)
        if BEFORE in target.name:
            reader.start()
            assert waits.wait(60)

    reader = threading.Thread(target=load)
    monkeypatch.setattr(atomic_folder.time, "sleep", wait)
    monkeypatch.setattr(atomic_folder.os, "rename", between)
    saver.finish()
    reader.join(60)
    assert seen == ["new"]
    assert names(place.parent) == ["c"]


def test_a_writer_goes_on_where_its_predecessor_was_put_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an older rannd, or where no lock tells that the writer lives."""
    saver = draft(place, "new")
    rename = os.rename
    put_back: list[Path] = []

    def between(source: Path, target: Path) -> None:
        rename(source, target)
        if BEFORE in target.name and len(put_back) < 3:
            put_back.append(target)
            rename(target, place)

    monkeypatch.setattr(atomic_folder.os, "rename", between)
    saver.finish()
    assert len(put_back) == 3
    assert (place / "marker").read_text() == "new"
    assert names(place.parent) == ["c"]


def test_what_steps_aside_comes_back_where_its_successor_cannot_take_its_place(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but rannd looked for it there: plain torch found no checkpoint."""
    saver = draft(place, "new")
    rename = os.rename

    def broken(source: Path, target: Path) -> None:
        if (source, target) == (saver.folder, place):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_folder.os, "rename", broken)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            saver.finish()
    saver.drop()
    assert (place / "marker").read_text() == "old"
    assert names(place.parent) == ["c"]


def test_recovery_leaves_a_folder_that_came_meanwhile(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = place.parent / f".c{BEFORE}0123"
    aside.mkdir()
    (aside / "marker").write_text("older")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: False)
        recover(place)
    assert (place / "marker").read_text() == "old"


def test_what_a_killed_writer_left_is_put_back_at_once(place: Path) -> None:
    saver = draft(place, "new")
    os.rename(place, place.parent / f".c{BEFORE}{saver.token}")
    os.close(saver._lock)
    recover(place)
    assert (place / "marker").read_text() == "old"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_failed_sync_of_the_parent_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr(atomic_folder, "exchange", lambda one, other: False)
    draft(tmp_path / "c", "old").finish()
    saver = draft(tmp_path / "c", "new")
    sync = atomic_folder.sync_folder

    def broken(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(folder)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_folder, "sync_folder", broken)
        with pytest.raises(UnsyncedError):
            saver.finish()
    assert (tmp_path / "c" / "marker").read_text() == "new"
    (old,) = set(tmp_path.iterdir()) - {tmp_path / "c"}
    assert (old / "marker").read_text() == "old"
    draft(tmp_path / "d", "other").finish()
    assert names(tmp_path) == ["c", "d"]


def test_new_parents_are_written_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(atomic_folder, "sync_folder", synced.append)
    Draft(tmp_path / "a" / "b" / "c", "marker").drop()
    assert set(synced) == {tmp_path, tmp_path / "a"}
