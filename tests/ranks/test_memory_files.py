"""Records in files in memory: whole ones are found, others are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rannd.ranks import memory_files
from rannd.ranks.memory_files import FIRST, KeptPart, RecordError

RECORD = KeptPart(number=4, step=9, rank=1, size=2, folder="/somewhere/else ü", names=["one", "two"], lengths=[3, 4])


@pytest.fixture
def file() -> Iterator[int]:
    made = memory_files.make()
    yield made[0]
    for each in made:
        os.close(each)


def write(file: int, record: KeptPart, place: int = 0, *, whole: bool = True) -> None:
    os.pwrite(file, record.prefix() + b"x" * sum(record.lengths), place)
    if whole:
        memory_files.set_whole(file, place)


def test_whole_records_are_found_in_their_places(file: int) -> None:
    other = replace(RECORD, rank=0, lengths=[0, 5])
    write(file, RECORD)
    write(file, other, RECORD.bytes)
    assert list(memory_files.records(file)) == [(FIRST, RECORD), (RECORD.bytes + FIRST, other)]


def test_what_is_not_whole_is_not_found(file: int) -> None:
    assert list(memory_files.records(file)) == []
    write(file, RECORD, whole=False)
    assert list(memory_files.records(file)) == []
    memory_files.set_whole(file, 0)
    assert len(list(memory_files.records(file))) == 1
    memory_files.spoil(file)
    assert list(memory_files.records(file)) == []
    memory_files.set_whole(file, 0)
    os.ftruncate(file, RECORD.bytes - 1)
    assert list(memory_files.records(file)) == []


@pytest.mark.parametrize(
    "header",
    [b"no JSON", b"[1]", b"{}", b'{"number": 1}', b"[" * 8000, b"\xff\xfe", b'{"number": 1, "more": 2}'],
)
def test_what_a_script_writes_there_is_no_record(file: int, header: bytes) -> None:
    os.pwrite(file, memory_files.MAGIC + header.ljust(FIRST - len(memory_files.MAGIC)), 0)
    assert list(memory_files.records(file)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2},
        {"rank": -1},
        {"size": 1 << 40},
        {"step": True},
        {"lengths": [3]},
        {"lengths": [3, -1]},
        {"folder": "relative"},
        {"names": ["one", "../two"]},
        {"names": ["one", ".."]},
        {"names": ["one", 2]},
    ],
)
def test_a_record_that_contradicts_itself(wrong: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        replace(RECORD, **wrong)  # type: ignore[arg-type]


def test_a_folder_whose_name_is_too_long() -> None:
    with pytest.raises(RecordError, match="8184"):
        replace(RECORD, folder="/" + "x" * FIRST).prefix()


def test_only_the_process_that_was_given_them_has_them() -> None:
    code = (
        "import os, sys; from rannd.ranks import memory_files as m; f = m.make(); m.give(f); "
        "assert m.given() == f; "
        "pid = os.fork(); "
        "(pid or os._exit(0 if m.given() == [] else 1)); "
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    assert memory_files.given() == []
    subprocess.run([sys.executable, "-c", code], check=True)
