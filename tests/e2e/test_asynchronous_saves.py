"""Asynchronous saves of real ranks: the last one fails; the watch beside one that takes long."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from job import ROOT, Job
from thinned import first

pytestmark = pytest.mark.ranks

LAST = str(ROOT / "tests/e2e/programs/last_save.py")
BESIDE = str(ROOT / "tests/e2e/programs/saves_beside.py")
HALVES = {"RANNC_PARTITION_NUM": "2"}
FAILED = r"the asynchronous save to \S*/last failed: .*rank \d on .*: File too large"
LOGGED = rf"\[error\] {FAILED}"


# -- the last one fails ------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("what", ["end", "exit"])
def test_a_job_whose_last_save_failed_ends_with_a_code_and_the_reason(job: Job, tmp_path: Path, what: str) -> None:
    output = job.run("rannc-run", "-np", "2", LAST, what, str(tmp_path), code=8, **HALVES)
    assert len(re.findall(LOGGED, output)) == 1, output
    table = [line for line in output.splitlines() if re.match(r"rannc-run:   \S+  +\d  ", line)]
    assert table, output
    for line in table:
        same = r"|the same as rank \d$" if line != table[-1] else ""
        assert re.search(rf"exit code 8  (rannd\.errors\.CheckpointError: {FAILED}{same})", line), output
    if what == "end":
        assert "handlers run" in output
        assert "rank 0 has done the rest" in output, output
    assert not [path for path in tmp_path.iterdir() if "last" in path.name]


@pytest.mark.long
def test_a_process_alone_ends_with_the_same_code(job: Job, tmp_path: Path) -> None:
    output = job.run(sys.executable, LAST, "exit", str(tmp_path), code=8)
    assert re.search(rf"^rannd\.errors\.CheckpointError: {FAILED}", output, re.MULTILINE), output


@pytest.mark.parametrize(("ranks", "what"), first(2, [(2, "call"), (1, "barrier"), (1, "call"), (2, "barrier")]))
def test_the_next_call_raises_it_on_all_ranks_which_may_go_on(job: Job, tmp_path: Path, ranks: int, what: str) -> None:
    output = job.train(ranks, LAST, what, str(tmp_path), **({} if ranks == 1 else HALVES))
    for rank in range(ranks):
        assert re.search(rf"rank {rank} caught {FAILED}", output), output
        assert f"rank {rank} step 1 done" not in output
        assert f"rank {rank} step 2 done" in output
    assert (tmp_path / "last" / "checkpoint.json").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("broken", "a connection to another rank broke"),
        ("gone", r"rank 1 \(.*it was killed, or crashed"),
    ],
)
def test_a_last_save_that_lost_a_rank_is_told_as_well(job: Job, tmp_path: Path, what: str, reason: str) -> None:
    """No call comes any more that would say it."""
    output = job.run("rannc-run", "-np", "2", LAST, what, str(tmp_path), code=8, **HALVES)
    assert re.search(rf"rannd\.errors\.CheckpointError: the asynchronous save to \S*/last failed: {reason}", output)
    assert not (tmp_path / "last").exists()


def test_a_rank_that_has_seen_the_error_stays_in_step(job: Job, tmp_path: Path) -> None:
    """The next save raised it on rank 1 alone."""
    output = job.train(2, LAST, "waited", str(tmp_path), **HALVES)
    for rank in (0, 1):
        assert re.search(rf"rank {rank} caught {FAILED}", output), output
        assert f"rank {rank} step 2 done" in output
    assert (tmp_path / "last" / "checkpoint.json").exists()
    assert not (tmp_path / "next").exists()


def test_a_rank_that_cannot_copy_its_values_is_told_on_all(job: Job, tmp_path: Path) -> None:
    """The savers of the others waited for it, and so did the next save."""
    output = job.train(2, LAST, "memory", str(tmp_path), **HALVES)
    for rank in (0, 1):
        assert re.search(rf"rank {rank} caught .*MemoryError: no more.*on rank 1 of 2", output), output
        assert f"rank {rank} step 2 done" in output
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_an_error_of_the_script_comes_first(job: Job, tmp_path: Path) -> None:
    output = job.train(2, LAST, "error", str(tmp_path), code=1, **HALVES)
    assert re.search(LOGGED, output), output
    assert re.search(r"exit code 1  KeyError: 'the script is wrong' \(last_save\.py:\d+\)", output), output


@pytest.mark.long
def test_a_rank_that_waits_at_its_end_is_not_waited_for(job: Job, tmp_path: Path) -> None:
    code, output = job.end("rannc-run", "-np", "2", LAST, "once more", str(tmp_path), **HALVES)
    assert code in (1, 8), output  # that of the rank which ends first
    broke = r"a connection to another rank broke in step 0, stage \d \(barrier\): rank 0 has ended its script"
    assert re.search(rf"rannd\.errors\.StepError: {broke}", output), output


# -- beside the watch --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_watchdog_leaves_a_save_its_time(job: Job, tmp_path: Path) -> None:
    watch = {"RANNC_RUN_WATCHDOG": "true", "RANNC_WATCHDOG_TIMEOUT_S": "2"}
    output = job.train(2, BESIDE, "watchdog", str(tmp_path), **watch)
    assert output.count("finished") == 2, output
    assert "no progress" not in output


def test_a_failure_is_raised_beside_a_saver_and_wakes_it(job: Job, tmp_path: Path) -> None:
    output = job.train(2, BESIDE, "failure", str(tmp_path), code=1, **HALVES)
    for rank in (0, 1):
        assert re.search(rf"rank {rank} made [1-9]\d* calls", output), output
    failed = r"rank 1 \(.*\) failed in the script, after step 1: KeyError: 'the script is wrong'"
    assert re.search(rf"rank 0 caught {failed}; the ranks are out of sync; restart the job", output), output
    assert "the saver has ended" in output
    assert re.search(rf"the saver raised .* failed: {failed} \(this is rank 0, in asynchronous save\)", output), output
    assert re.search(r"exit code 1  KeyError: 'the script is wrong' \(saves_beside\.py:\d+\)", output), output
