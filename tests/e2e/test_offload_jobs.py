"""Jobs whose optimizer state, parameters or activations leave memory because nothing else fits: items are auto."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job import FORK, FROM_CACHE, PLANNED, Job

PROGRAM = "tests/e2e/programs/large_state.py"
PLAN = {
    "RANNC_PIPELINE_NUM": "1",
    "RANNC_OPT_PARAM_FACTOR": "3",
    # Tensors are mappings of their own, so that RLIMIT_DATA counts what is in use, not what malloc keeps.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
SCARCE = {**PLAN, "RANNC_MEM_LIMIT_GB": "1.5"}
"""1.35 GiB of 1.92 that a plan would need with all state in memory."""
LIMIT_MIB = 1250
WHY = r"without it 1\.9\d+ GiB of each device would be needed, 1\.35 GiB are allowed"


def _train(job: Job, *arguments: str, code: int = 0, **variables: str) -> str:
    """Output of the program in a process of its own: forks have the malloc of their server."""
    return job.run("rannc-run", "-np", "1", PROGRAM, *arguments, code=code, **variables)


def _told(shown: str) -> None:
    assert re.search(rf"^offload +yes +{WHY}$", shown, re.MULTILINE), shown
    assert "960 MiB of optimizer state offloaded" in shown


def _losses(output: str) -> list[str]:
    found = re.findall(r"step \d: loss (\S+?),?\s", output)
    assert len(found) == 3, output
    return found


@pytest.mark.full
def test_training_state_larger_than_memory(job: Job, tmp_path: Path) -> None:
    whole = job.train(1, PROGRAM, "Adam", **PLAN)
    state = re.search(r"training state (\d+) MiB", whole)
    assert state is not None
    assert int(state[1]) > 1.25 * LIMIT_MIB
    assert "offloaded" not in whole
    for known in (PLANNED, FROM_CACHE):
        folder = tmp_path / str(known == PLANNED)
        output = _train(job, "Adam", str(LIMIT_MIB), **SCARCE, RANNC_OFFLOAD_DIR=str(folder))
        assert known in output
        assert len(re.findall(rf"The optimizer's state is offloaded: {WHY}", output)) == 1
        assert _losses(output) == _losses(whole)
        assert f"training state {state[1]} MiB" in output
        assert list(folder.iterdir()) == []
    key = re.search(r"Plan from the cache \((\w+)\)", output)
    assert key is not None
    _told(job.run("rannc-cache", "show", key[1]))
    # the limit is one
    output = _train(job, "Adam", str(LIMIT_MIB), code=1, **PLAN, RANNC_OFFLOAD_OPTIMIZER="0")
    assert "step 0" not in output
    assert "Cannot allocate memory" in output


@pytest.mark.long
def test_a_plan_that_is_only_made_tells_why(job: Job) -> None:
    _told(job.run("rannc-run", "--plan-only", "-np", "1", FORK, PROGRAM, "Adam", **SCARCE))


def test_an_optimizer_that_cannot_step_parameters_apart_is_never_offloaded(job: Job) -> None:
    output = job.run("rannc-run", "--plan-only", "-np", "1", FORK, PROGRAM, "Adafactor", code=1, **SCARCE)
    assert "no plan fits 1 device: the best one needs 1.9" in output
    assert "would do" not in output


def _fits(
    job: Job, tmp_path: Path, program: str, mib: int, planned_gb: str, told: str, **without: str
) -> tuple[str, str]:
    """Output of a program as it is, and with `planned_gb` within `mib` of private memory.

    Its plan has to say `told`. With the variables `without` it does not fit.
    """
    malloc = {"RANNC_PIPELINE_NUM": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    whole = job.run("rannc-run", "-np", "1", program, **malloc)
    scarce = {**malloc, "RANNC_MEM_LIMIT_GB": planned_gb, "RANNC_OFFLOAD_DIR": str(tmp_path / "offload")}
    output = job.run("rannc-run", "-np", "1", program, str(mib), **scarce)
    assert len(re.findall(f"{told} are offloaded: without it .* of each device would be needed", output)) == 1
    assert _losses(output) == _losses(whole)
    most = [re.search(r"most memory (\d+) MiB", text) for text in (whole, output)]
    assert [found is not None and int(found[1]) < mib for found in most] == [False, True]
    # the limit is one
    ended = job.run("rannc-run", "-np", "1", program, str(mib), code=1, **malloc, **without)
    assert "step 0" in ended
    assert "step 1: loss" not in ended
    return whole, output


@pytest.mark.long
def test_parameters_larger_than_memory(job: Job, tmp_path: Path) -> None:
    """Training state is more than four times the limit."""
    program = "tests/e2e/programs/large_model.py"
    found = _fits(job, tmp_path, program, 450, "0.4", "Parameters", RANNC_OFFLOAD_PARAMS="0")
    for text in found:
        sizes = re.search(r"parameters (\d+) MiB", text)
        assert sizes is not None
        assert int(sizes[1]) > 450


@pytest.mark.full
def test_activations_larger_than_memory(job: Job, tmp_path: Path) -> None:
    """Recomputing is not enough: what blocks start from alone is more than what may be planned."""
    program = "tests/e2e/programs/large_activations.py"
    without = {"RANNC_CHECKPOINTING": "1", "RANNC_OFFLOAD_ACTIVATIONS": "0"}
    _, output = _fits(job, tmp_path, program, 520, "0.25", "Activations", **without)
    assert re.search(r"3\d\d MiB of activations offloaded", output)
