"""Stacks of other threads, read without frame objects."""

from __future__ import annotations

import _thread
import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rannd.runtime.failure import stack_dump, thread_stacks
from rannd.runtime.failure.position import Where

Begin = Callable[[str, str, int], int]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Start threads that stay in function `name` of `file`, called by itself `depth` times; returns their idents."""
    locks: list[_thread.LockType] = []

    def run(file: str, name: str, depth: int = 0) -> int:
        entered, lock = threading.Event(), _thread.allocate_lock()
        lock.acquire()
        locks.append(lock)
        scope: dict[str, Any] = {"entered": entered, "lock": lock}
        text = f"def {name}(left):\n    if left:\n        return {name}(left - 1)\n    entered.set(); lock.acquire()"
        exec(compile(text, file, "exec"), scope)
        ident = _thread.start_new_thread(scope[name], (depth,))
        assert entered.wait(10)
        return ident

    yield run
    for lock in locks:
        lock.release()


def test_the_stack_of_a_thread_with_lines_and_functions(begin: Begin) -> None:
    loader = begin("/home/me/train.py", "load", 2)
    stack = thread_stacks.read()[loader]
    assert [(each.function, each.number) for each in stack.lines] == [("load", 4), ("load", 3), ("load", 3)]
    assert {each.file for each in stack.lines} == {"/home/me/train.py"}
    assert stack.whole


def test_names_that_are_not_ascii(begin: Begin) -> None:
    loader = begin("/home/jürgen/学習/zug 🚂.py", "lädt")
    stack = thread_stacks.read()[loader]
    assert (stack.lines[0].file, stack.lines[0].function) == ("/home/jürgen/学習/zug 🚂.py", "lädt")


def test_the_calling_thread_is_there_too() -> None:
    mine = thread_stacks.read()[threading.get_ident()]
    assert [each.function for each in mine.lines[:2]] == ["read", "test_the_calling_thread_is_there_too"]


def test_a_thread_that_has_ended_is_not() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.ident not in thread_stacks.read()


def test_a_stack_that_is_too_deep_says_so(begin: Begin) -> None:
    deep = begin("/home/me/model.py", "forward", thread_stacks.MOST_LINES)
    stack = thread_stacks.read()[deep]
    assert len(stack.lines) == thread_stacks.MOST_LINES
    assert not stack.whole
    less_deep = begin("/home/me/model.py", "forward", thread_stacks.MOST_LINES - 1)
    assert thread_stacks.read()[less_deep].whole


def test_a_model_that_is_too_deep_to_see_rannd_is_seen_as_inside_of_it(begin: Begin) -> None:
    where = Where()
    where.thread = begin("/lib/python3/deep.py", "forward", 150)
    assert stack_dump.doing(where) == "script"
    where.depth, where.user_line, where.call = 1, "train.py:33", "forward"
    assert stack_dump.doing(where) == "working"
    where.preparing = True
    assert (stack_dump.doing(where), stack_dump.activity(where)) == ("preparing", "preparing")
    assert stack_dump.entry(where) == "forward"


def test_the_dump_has_lines_innermost_last(begin: Begin) -> None:
    begin("/home/me/train.py", "load", 2 * stack_dump.DEEPEST)
    mine = next(part for part in stack_dump.dump().split("thread ") if "train.py" in part)
    rows = [row for row in mine.splitlines() if row.startswith("  File")]
    assert len(rows) == 4  # equal ones are counted: [Previous line repeated ..]
    assert rows[-1] == '  File "/home/me/train.py", line 4, in load'


def test_progress_is_seen_by_lines() -> None:
    where, turn, seen = Where(), threading.Event(), []

    def script() -> None:
        where.thread = threading.get_ident()
        turn.wait()

    thread = threading.Thread(target=script)
    thread.start()
    while where.thread != thread.ident or "wait" not in stack_dump.line(where):
        pass
    seen = [stack_dump.progress(where), stack_dump.progress(where)]
    turn.set()
    thread.join()
    assert seen[0] == seen[1] != stack_dump.progress(where)


def test_reading_beside_threads_that_call_and_allocate() -> None:
    """Two hundred reads beside threads that make and drop frames, generators and cycles."""
    ends = threading.Event()

    def recurse(depth: int) -> Any:
        cycle: list[Any] = []
        cycle.append(cycle)
        return sum(each for each in (depth, recurse(depth - 1) if depth else 0))

    def run() -> None:
        while not ends.is_set():
            recurse(40)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        deepest = max(max(len(stack.lines) for stack in thread_stacks.read().values()) for _ in range(200))
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert deepest > 40


def test_one_stack_is_that_among_all(begin: Begin) -> None:
    thread_stacks.note()
    main, loader = threading.main_thread().ident or 0, begin("/home/me/train.py", "load", 2)
    for ident in (main, loader):
        one, among_all = thread_stacks.read_one(ident), thread_stacks.read()[ident]
        assert one is not None
        if ident == main:
            assert [each.function for each in one.lines[:2]] == ["read_one", "test_one_stack_is_that_among_all"]
        assert one.lines[-1] == among_all.lines[-1]
        assert one.whole == among_all.whole
    assert thread_stacks.read_one(1) is None


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="faulthandler reads no states without values there")
def test_the_main_threads_is_read_without_the_list_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    thread_stacks.note()
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda *_, **__: pytest.fail("all are read"))
    found: list[thread_stacks.ThreadStack | None] = []
    other = threading.Thread(target=lambda: found.append(thread_stacks.read_one(threading.main_thread().ident or 0)))
    other.start()
    other.join()
    (stack,) = found
    assert stack is not None
    assert "test_the_main_threads_is_read_without_the_list_of_all" in [each.function for each in stack.lines]
