"""A host file that changes while a job runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rannd.errors import UsageError
from rannd.runner.elastic import host_file
from rannd.runner.elastic.host_file import HostFile
from rannd.runner.resources.host_list import Host


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "SETTLE_S", 0.05)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def make(tmp_path: Path, said: list[str]) -> Callable[[str], HostFile]:
    def make(text: str) -> HostFile:
        path = tmp_path / "hosts"
        path.write_text(text)
        return HostFile(path, said.append)

    return make


def _after_a_while(file: HostFile) -> bool:
    """Whether it has changed, once a change has settled."""
    assert not file.changed(), "a change has to settle"
    time.sleep(0.1)
    return file.changed()


def test_a_file_that_stays_does_not_change(make: Callable[[str], HostFile]) -> None:
    file = make("localhost slots=2")
    assert not _after_a_while(file)
    assert file.hosts == [Host("localhost", 2)]


def test_other_slots_are_a_change_which_is_told_once(make: Callable[[str], HostFile]) -> None:
    file = make("localhost slots=2")
    file.path.write_text("localhost slots=3")
    assert _after_a_while(file)
    assert file.hosts == [Host("localhost", 3)]
    assert not _after_a_while(file)


def test_a_comment_is_no_change(make: Callable[[str], HostFile]) -> None:
    file = make("localhost slots=2")
    file.path.write_text("localhost slots=2  # the same")
    assert not _after_a_while(file)


def test_a_file_that_takes_its_place_is_a_change(make: Callable[[str], HostFile], tmp_path: Path) -> None:
    file = make("localhost slots=2")
    other = tmp_path / "other"
    other.write_text("localhost slots=5")
    os.utime(other, ns=(0, os.stat(file.path).st_mtime_ns))
    os.replace(other, file.path)
    assert _after_a_while(file)
    assert file.hosts == [Host("localhost", 5)]


@pytest.mark.parametrize("text", ["", "localhost slots=", "localhost slots=0", "localhost gpus=2"])
def test_a_wrong_file_is_told_and_the_hosts_stay(make: Callable[[str], HostFile], said: list[str], text: str) -> None:
    file = make("localhost slots=2")
    file.path.write_text(text)
    assert not _after_a_while(file)
    assert file.hosts == [Host("localhost", 2)]
    assert len(said) == 1
    assert said[0].endswith("the job goes on with the hosts that it had")
    file.path.write_text("localhost slots=1")
    assert _after_a_while(file)


def test_a_file_that_goes_is_told_and_may_come_back(make: Callable[[str], HostFile], said: list[str]) -> None:
    file = make("localhost slots=2")
    file.path.unlink()
    assert not _after_a_while(file)
    assert "No such file" in said[0]
    file.path.write_text("localhost slots=4")
    assert _after_a_while(file)


def test_a_file_that_is_wrong_at_the_start_is_an_error(make: Callable[[str], HostFile]) -> None:
    with pytest.raises(UsageError, match="names no host"):
        make("# nobody")
