"""What is said about a job that has ended, and its exit code."""

from __future__ import annotations

import signal

import pytest

from rannd.runner.report import exit_code, report, status_words
from rannd.runner.watch.job_result import JobResult, RankEnd


def end(rank: int, status: int = 0, *, ordered: bool = False, time: float = 0.0, tail: str = "") -> RankEnd:
    return RankEnd(rank, "node1", 100 + rank, status, time, tail, ordered)


GOOD = end(0)


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (JobResult([GOOD]), 0),
        (JobResult([end(1, 7), end(0, -15, ordered=True)]), 7),
        (JobResult([end(1, -9), end(0, 1)]), 137),
        (JobResult([end(0, -2, ordered=True)], signal=signal.SIGINT), 130),
        (JobResult([end(0, 1)], signal=signal.SIGTERM), 143),
        (JobResult([], missing=2, launcher_status=1), 7),
        (JobResult([GOOD], missing=1, launcher_status=0), 7),
        (JobResult([end(0, -15, ordered=True)], launcher_status=-9), 137),
        # MPI_Abort with code 0, or whatever else makes the launcher end ranks and call it well.
        (JobResult([end(0, -15, ordered=True)], launcher_status=0), 143),
    ],
)
def test_exit_codes(result: JobResult, code: int) -> None:
    assert exit_code(result) == code


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "exit code 3"),
        (-9, "killed by SIGKILL (out of memory is likely, unless someone killed it)"),
        (-10, "killed by SIGUSR1"),
        (-64, "killed by SIGRTMAX"),
        (-99, "killed by signal 99"),
    ],
)
def test_words(status: int, words: str) -> None:
    assert status_words(status) == words


def test_nothing_is_said_after_a_good_job() -> None:
    assert report(JobResult([GOOD]), "Open MPI", {0}, "/logs/run") == ""


def test_the_first_failure_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    result = JobResult(
        [end(2, 1, time=0.25, tail="Traceback\nValueError: x\n\n"), end(0, -9, time=1), end(1, -15, ordered=True)]
    )
    text = report(result, "Open MPI", {0, 1, 2}, "/logs/run").splitlines()
    assert text[0] == "rannc-run: 2 of 3 ranks failed, the first failure last:"
    assert text[1].split()[1:] == ["host", "rank", "pid", "time", "end", "error"]
    assert text[2].endswith("killed by SIGKILL (out of memory is likely, unless someone killed it)  -")
    assert text[3].split()[1:4] == ["node1", "2", "102"]
    assert text[3].endswith("exit code 1" + " " * 60 + "ValueError: x")
    assert text[4:] == ["rannc-run: ended by rannc-run: rank 1", "rannc-run: logs: /logs/run"]


def test_an_error_of_several_ranks_is_told_once() -> None:
    same = "Traceback\nValueError: x\n"
    ends = [end(2, 1, tail=same), end(0, 1, tail=same), end(1, -9), end(3, -9), end(4, 1, tail="ValueError: y\n")]
    rows = report(JobResult(ends), "Open MPI", {0, 1, 2, 3, 4}, None).splitlines()[2:]
    told = [(row.split()[2], row.split("  ")[-1]) for row in rows]
    assert told == [("4", "ValueError: y"), ("3", "-"), ("1", "-"), ("0", "the same as rank 2"), ("2", "ValueError: x")]


def test_an_error_from_several_lines_of_the_script_is_told_once() -> None:
    tail = 'Traceback (most recent call last):\n  File "a.py", line {}, in <module>\n    f()\nStepError: x\n'
    rows = report(
        JobResult([end(0, 1, tail=tail.format(3)), end(1, 1, tail=tail.format(4))]), "Open MPI", {0, 1}, None
    ).splitlines()[2:]
    assert [row.split("  ")[-1] for row in rows] == ["the same as rank 0, at a.py:4", "StepError: x (a.py:3)"]


def test_a_hidden_ranks_errors_are_repeated() -> None:
    text = report(JobResult([end(1, 1, tail="one\ntwo\n")]), "Open MPI", {0}, None)
    assert text.startswith(
        "rannc-run: standard error of rank 1 on node1 ends with:\nrannc-run:   one\nrannc-run:   two\n"
    )


def test_a_launcher_that_ends_well_under_running_ranks() -> None:
    result = JobResult([end(0, -15, ordered=True), end(1, -15, ordered=True)], launcher_output="lost a daemon\n")
    assert exit_code(result) == 128 + 15
    assert report(result, "Open MPI", {0, 1}, None) == (
        "rannc-run: Open MPI failed: it exited before its ranks\n"
        "rannc-run: ended with it: ranks 0, 1\n"
        "rannc-run: output of Open MPI:\n"
        "rannc-run:   lost a daemon\n"
    )


def test_ranks_that_started_too_late() -> None:
    result = JobResult([end(0, -15, ordered=True), end(1, -15, ordered=True)], late=True)
    assert exit_code(result) == 7
    assert report(result, "Open MPI", {0, 1}, None) == "rannc-run: ended by rannc-run: ranks 0, 1\n"


def test_the_launcher_is_quoted_where_ranks_never_started() -> None:
    result = JobResult([], missing=2, launcher_status=1, launcher_output="no such host: b\n")
    assert report(result, "MPICH", {0, 1}, None) == (
        "rannc-run: MPICH failed: exit code 1\n"
        "rannc-run: 2 of 2 ranks never started\n"
        "rannc-run: output of MPICH:\n"
        "rannc-run:   no such host: b\n"
    )
