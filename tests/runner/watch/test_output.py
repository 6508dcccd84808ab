"""Lines with their prefix, and the queue of writes."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannd.runner.watch import output
from rannd.runner.watch.output import LineTagger, OutputQueue


def tagged(*pieces: bytes, prefix: bytes = b"> ") -> bytes:
    tagger = LineTagger(prefix)
    return b"".join([*map(tagger.feed, pieces), tagger.flush()])


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], b"> a\n> b\n"),
        ([b"a", b"b\nc"], b"> ab\n> c\n"),
        ([b"\n\n"], b"> \n> \n"),
        ([], b""),
        ([b"10%\r20%\r", b"done\n"], b"> 10%\r> 20%\r> done\n"),
        ([b"dos\r", b"\nend"], b"> dos\r\n> end\n"),
        ([b"\r 0%", b"\r 50%", b"\r"], b">  0%\r>  50%\r"),
        ([b"\r"], b""),
        ([b"\r 0%", b"[RaNNCModule] [info] Plan\n", b"\r 9%\n"], b">  0%\n> [RaNNCModule] [info] Plan\n>  9%\n"),
        ([b"\r 0%", b"[1/9] [eta 3 s] ", b"\n"], b">  0%[1/9] [eta 3 s] \n"),
        ([b"\r 0%\r", b"[RaNNCModule] [info] Plan\n"], b">  0%\r> [RaNNCModule] [info] Plan\n"),
    ],
)
def test_each_line_gets_its_prefix(pieces: list[bytes], expected: bytes) -> None:
    assert tagged(*pieces) == expected


@given(lines=st.lists(st.binary().filter(lambda line: b"\n" not in line and b"\r" not in line)), size=st.integers(1, 9))
def test_any_cutting_gives_the_same_lines(lines: list[bytes], size: int) -> None:
    text = b"".join(line + b"\n" for line in lines)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    assert tagged(*pieces) == b"".join(b"> " + line + b"\n" for line in lines)


def test_without_prefix_nothing_is_held_back() -> None:
    tagger = LineTagger(b"")
    assert tagger.feed(b"Name: ") == b"Name: "
    assert tagger.flush() == b""


def test_an_endless_line_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LINE", 8)
    assert tagged(b"x" * 6, b"y" * 6, b"z\n") == b"> xxxxxxyyyyyy\n> z\n"


def test_the_queue_finishes_one_write_before_the_next() -> None:
    read_end, write_end = os.pipe()
    queue = OutputQueue()
    queue.write(write_end, b"a" * 5000)
    queue.write(write_end, b"b" * 10)
    assert queue.pending == 5010
    while queue.waiting_for is not None:
        queue.pump()
    assert queue.pending == 0
    assert os.read(read_end, 9999) == b"a" * 5000 + b"b" * 10
    os.close(read_end)
    os.close(write_end)


def test_a_reader_that_is_gone() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    queue = OutputQueue()
    queue.write(write_end, b"a" * 5000)
    queue.write(write_end, b"b")
    while queue.waiting_for is not None:
        queue.pump()
    queue.write(write_end, b"c")
    assert (queue.broken, queue.pending) == ({write_end}, 0)
    os.close(write_end)
