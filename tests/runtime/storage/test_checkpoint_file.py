"""Files of a checkpoint: only regular ones are opened, of the right size, and none is waited for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rannd.errors import CheckpointError
from rannd.runtime.storage.checkpoint_file import checked, facts, is_plain_name, opened


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "cannot be read: No such file"),
        (Path.mkdir, "is damaged: it is not a regular file"),
        (os.mkfifo, "is damaged: it is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a symbolic link to /dev/zero"),
        (lambda path: path.symlink_to(__file__), "is a symbolic link to .*put the file itself into the folder"),
        (lambda path: path.symlink_to("nowhere"), "is a symbolic link to nowhere"),
        (lambda path: path.write_bytes(b"12345"), "is damaged: it has 5 bytes, more than 4"),
    ],
)
def test_what_is_no_file_of_a_checkpoint(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    make(tmp_path / "it")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=rf"/it {message}"), opened(tmp_path / "it", 4):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_devices_are_not_read() -> None:
    with pytest.raises(CheckpointError, match="not a regular file"), opened(Path("/dev/zero")):
        pass


def test_a_file_has_the_size_and_the_checksum_with_which_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "it"
    path.write_bytes(b"1234")
    wanted = facts(path)
    with checked(path, None, wanted) as file:
        assert file.read() == b"1234"
    path.write_bytes(b"1235")
    with pytest.raises(CheckpointError, match="is damaged: 4 bytes with checksum"), checked(path, None, wanted):
        pass
    os.truncate(path, 4 << 40)  # sparse: nobody reads that
    with pytest.raises(CheckpointError, match=r"has 4398046511104 bytes, it was written with 4$"):
        checked(path, None, wanted).__enter__()


def test_an_error_while_reading_is_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(b"1")
    with pytest.raises(CheckpointError, match=r"/it cannot be read: Input/output error"), opened(tmp_path / "it"):
        raise OSError(5, os.strerror(5))


def test_a_folder_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "step5").mkdir()
    (tmp_path / "step5" / "it").write_bytes(b"1")
    (tmp_path / "last").symlink_to("step5")
    with opened(tmp_path / "last" / "it") as file:
        assert file.read() == b"1"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\0"])
def test_names_that_lead_elsewhere(name: str) -> None:
    assert not is_plain_name(name)
    assert is_plain_name("__0_0.distcp")
    assert is_plain_name("..a")
