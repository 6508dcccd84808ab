"""Jobs whose optimizer state, parameters or activations leave memory because nothing else fits: items are auto."""

from __future__ import annotations

import re
from pathlib import Path

from job import FORK, FROM_CACHE, PLANNED, Job

PROGRAM = "tests/e2e/programs/large_state.py"
PLAN = {
    "RANNC_PIPELINE_NUM": "1",
    "RANNC_OPT_PARAM_FACTOR": "3",
    # Tensors are mappings of their own, so that RLIMIT_DATA counts what is in use, not what malloc keeps.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
}
SCARCE = {**PLAN, "RANNC_MEM_LIMIT_GB": "1.5"}
"""1.35 GiB of 1.88 that a plan would need with all state in memory."""
LIMIT_MIB = 1250
WHY = r"without it 1\.8\d+ GiB of each device would be needed, 1\.35 GiB are allowed"


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


def test_a_plan_that_is_only_made_tells_why(job: Job) -> None:
    _told(job.run("rannc-run", "--plan-only", "-np", "1", FORK, PROGRAM, "Adam", **SCARCE))


def test_an_optimizer_that_cannot_step_parameters_apart_is_never_offloaded(job: Job) -> None:
    output = job.run("rannc-run", "--plan-only", "-np", "1", FORK, PROGRAM, "Adafactor", code=1, **SCARCE)
    assert "no plan fits 1 device: the best one needs 1.8" in output
    assert "would do" not in output


def test_parameters_larger_than_memory(job: Job, tmp_path: Path) -> None:
    """Training state is more than four times the limit."""
    program, limit_mib = "tests/e2e/programs/large_model.py", 450
    malloc = {"RANNC_PIPELINE_NUM": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    whole = job.run("rannc-run", "-np", "1", program, **malloc)
    scarce = {**malloc, "RANNC_MEM_LIMIT_GB": "0.4", "RANNC_OFFLOAD_DIR": str(tmp_path / "offload")}
    output = job.run("rannc-run", "-np", "1", program, str(limit_mib), **scarce)
    assert len(re.findall("Parameters are offloaded: without it .* of each device would be needed", output)) == 1
    assert _losses(output) == _losses(whole)
    for text, enough in ((whole, False), (output, True)):
        sizes = re.search(r"parameters (\d+) MiB, most memory (\d+) MiB", text)
        assert sizes is not None
        assert int(sizes[1]) > limit_mib
        assert (int(sizes[2]) < limit_mib) == enough
    # the limit is one
    output = job.run("rannc-run", "-np", "1", program, str(limit_mib), code=1, **malloc, RANNC_OFFLOAD_PARAMS="0")
    assert "step 0" in output
    assert "step 1: loss" not in output


def test_activations_larger_than_memory(job: Job, tmp_path: Path) -> None:
    """What blocks start from alone is more than the limit: recomputing is not enough."""
    program, limit_mib = "tests/e2e/programs/large_activations.py", 520
    malloc = {"RANNC_PIPELINE_NUM": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    whole = job.run("rannc-run", "-np", "1", program, **malloc)
    scarce = {**malloc, "RANNC_MEM_LIMIT_GB": "0.25", "RANNC_OFFLOAD_DIR": str(tmp_path / "offload")}
    output = job.run("rannc-run", "-np", "1", program, str(limit_mib), **scarce)
    assert len(re.findall("Activations are offloaded: without it .* of each device would be needed", output)) == 1
    assert re.search(r"3\d\d MiB of activations offloaded", output)
    assert _losses(output) == _losses(whole)
    for text, enough in ((whole, False), (output, True)):
        most = re.search(r"most memory (\d+) MiB", text)
        assert most is not None
        assert (int(most[1]) < limit_mib) == enough
    # the limit is one
    without = {**malloc, "RANNC_CHECKPOINTING": "1", "RANNC_OFFLOAD_ACTIVATIONS": "0"}
    output = job.run("rannc-run", "-np", "1", program, str(limit_mib), code=1, **without)
    assert "step 0" in output
    assert "step 1: loss" not in output
