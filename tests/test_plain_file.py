"""Files that users hand around: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rannd.errors import UsageError
from rannd.plain_file import PlainFile

FILE = PlainFile("letter", "the post", UsageError, 100)


def test_a_file_written_in_parts_is_there_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "letter"
    file.write_bytes(b"before")
    with FILE.writing(file, 0o600) as opened:
        opened.write(b"one ")
        opened.flush()
        assert file.read_bytes() == b"before", "a reader never sees half a file"
        opened.write(b"two")
    assert file.read_bytes() == b"one two"
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_block_that_raises_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "letter"
    file.write_bytes(b"before")

    def write() -> None:
        with FILE.writing(file) as opened:
            opened.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file], "no draft stays"


def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path) -> None:
    """A user who is root could else put a file in the place of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="not a regular file; name another"):
        FILE.write(b"x", pipe)
    assert list(tmp_path.iterdir()) == [pipe]
    assert pipe.is_fifo()


@pytest.mark.parametrize(("name", "words"), [("/", "a folder"), ("~nobody-of-this-name/x", "home directory")])
def test_a_path_without_a_file_is_an_error_of_the_user(name: str, words: str) -> None:
    file = Path(name)
    with pytest.raises(UsageError, match=words):
        FILE.ensure_writable(file)
    with pytest.raises(UsageError):
        FILE.read(file)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "letter"
    file.write_bytes(bytes(100))
    assert FILE.read(file) == bytes(100)
    file.write_bytes(bytes(101))
    with pytest.raises(UsageError, match="has 101 bytes, more than 100"):
        FILE.read(file)


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "letter"
    file.write_bytes(bytes(100))
    checked = PlainFile._check

    def grow(self: PlainFile, *words: object) -> None:
        checked(self, *words)
        file.write_bytes(bytes(101))

    monkeypatch.setattr(PlainFile, "_check", grow)
    with pytest.raises(UsageError, match="has 101 bytes, more than 100"):
        FILE.read(file)
