"""A short soak, so that the harness of `make test-soak` stays sound, and what it finds."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import soak_leaks
from soak_job import Output, faults_of
from soak_plan import KINDS, STEPS, WHO, draw

SCRIPT = Path(__file__).with_name("soak_run.py")
JOB = KINDS[0]


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_eight_jobs_lose_nothing_and_leave_nothing() -> None:
    command = [sys.executable, str(SCRIPT), "8", "2", "0"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout


def test_half_of_the_jobs_are_hit_in_every_way_and_the_daemon_early() -> None:
    jobs = draw(200, 0)
    assert [job.number for job in jobs] == list(range(200))
    assert [job.kind for job in jobs[: len(KINDS)]] == list(KINDS)
    assert not any(job.hit or job.hits_daemon for job in jobs[: len(KINDS)])
    hits = Counter((job.hit.target, job.hit.signum) for job in jobs if job.hit)
    assert set(hits) == set(WHO)
    assert sum(hits.values()) == (200 - len(KINDS) + 1) // 2
    assert max(hits.values()) - min(hits.values()) <= 1
    daemon = [job.number for job in jobs if job.hits_daemon]
    assert len(daemon) == 6
    assert max(daemon) < 110
    assert not any(jobs[number].hit for number in daemon)
    assert [job.number for job in draw(8, 0) if job.hits_daemon]
    assert draw(200, 0) == jobs
    assert draw(200, 1) != jobs


def printed(*, first: int = 1, last: int = STEPS, plan: str = "aa", finished: bool = True, off: float = 0.0) -> Output:
    """What the two ranks of `JOB` print."""
    output = Output()
    for rank in range(JOB.ranks):
        output.feed(f"[vm:{rank}] rank {rank} begins with step {first}\n[vm:{rank}] rank {rank} plan {plan}\n")
        for step in range(first, last + 1):
            output.feed(f"rank {rank} step {step} loss {(1 / (step + rank) + off).hex()}\nrank {rank} saved {step}\n")
        if finished:
            output.feed(f"rank {rank} finished\n")
    return output


@pytest.mark.parametrize(
    ("output", "code", "hit", "early", "known", "fault"),
    [
        (printed(), 0, False, False, 0, ""),
        (printed(), 0, True, False, 0, ""),
        (printed(first=9), 0, False, False, 8, ""),
        (printed(last=5, finished=False), 137, True, False, 0, ""),
        (Output(), -9, True, False, 8, ""),
        (Output(), -9, True, True, 8, ""),
        (printed(), 0, True, True, 0, "exit code 0, though it was hit long before its end"),
        (printed(last=5, finished=False), 0, True, False, 0, "exit code 0, but ranks have not come to the end"),
        (printed(last=5, finished=False), 137, False, False, 0, "exit code 137, and nothing had hit it"),
        (printed(first=5), 0, False, False, 8, "went on from step 4, but step 8 had been saved"),
        (
            printed(last=STEPS - 1),
            0,
            False,
            False,
            0,
            f"losses are missing, of (rank, step): [(0, {STEPS}), (1, {STEPS})]",
        ),
        (printed(off=1e-14), 0, False, False, 0, "loss of rank 0 in step 1: "),
        (printed(off=1e-14, plan="bb"), 0, False, False, 0, ""),
        (printed(off=1e-6, plan="bb"), 0, False, False, 0, "loss of rank 0 in step 1: "),
        (printed(off=float("nan")), 137, True, False, 0, "loss of rank 0 in step 1: "),
    ],
)
def test_what_is_wrong_with_a_job(output: Output, code: int, hit: bool, early: bool, known: int, fault: str) -> None:
    faults = faults_of(JOB, output, code, printed(), hit=hit, early=early, known=known)
    assert [each.startswith(fault) for each in faults[:1]] == ([True] if fault else []), faults


def test_lines_that_are_cut_off_are_none() -> None:
    output = printed(last=7, finished=False)
    assert output.step == output.saved == 7
    assert not output.complete(JOB)
    assert printed().complete(JOB)


def test_processes_of_a_job_are_found() -> None:
    mark = f"test-{os.getpid()}"
    sleeping = [sys.executable, "-c", "print(flush=True); import time; time.sleep(1000)", "x y"]
    given: dict[str, Any] = {"env": {**os.environ, soak_leaks.MARK: mark}, "start_new_session": True}
    with subprocess.Popen(sleeping, stdout=subprocess.PIPE, **given) as process:
        try:
            assert process.stdout.readline(), "it has its environment"  # type: ignore[union-attr]
            assert set(soak_leaks.processes_of(mark)) == {process.pid}
            assert soak_leaks.processes_of(mark[:-1]) == {}
        finally:
            process.kill()
        process.wait()
    assert soak_leaks.processes_of(mark) == {}


def test_shared_memory_is_left_when_nobody_uses_it() -> None:
    before = soak_leaks.shared_memory()
    with tempfile.NamedTemporaryFile(dir=soak_leaks.SHARED, prefix="soak test ") as file:
        file.truncate(4096)
        new = {path for path in soak_leaks.shared_memory() - before if path == file.name}
        assert new == {file.name}
        assert soak_leaks.unused(new) == set()
        with mmap.mmap(file.fileno(), 4096):
            os.close(os.dup(file.fileno()))
            assert soak_leaks.unused(new) == set()
        other = Path(file.name + " left")
        other.touch()
        try:
            assert soak_leaks.unused({*new, str(other)}) == {str(other)}
        finally:
            other.unlink()


@pytest.mark.parametrize(
    ("values", "grown"),
    [([30.0] * 90, 0.0), ([30.0, 90.0, 31.0] * 30, 0.0), ([30.0 + n / 10 for n in range(90)], 6.0), ([1.0, 2.0], 0.0)],
)
def test_growth_is_that_of_the_middle_of_thirds(values: list[float], grown: float) -> None:
    assert soak_leaks.growth(values) == pytest.approx(grown)


def test_signals_are_of_the_kinds_that_users_send() -> None:
    assert {signum for _, signum in WHO} == {signal.SIGKILL, signal.SIGTERM, signal.SIGINT}
