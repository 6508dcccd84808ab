"""Models from the meta device on real ranks: same values everywhere, same training, no rank with all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from job import Job

pytestmark = pytest.mark.ranks


def digests(job: Job, folder: Path, which: str, plans: list[tuple[int, int]]) -> list[dict[str, str]]:
    """Of the values that each model begins with, under plans of (ranks, stages)."""
    found = []
    for ranks, stages in plans:
        output = job.train(
            ranks, "tests/e2e/programs/meta_models.py", str(folder), which, RANNC_PARTITION_NUM=str(stages)
        )
        assert output.count("all agree") == ranks
        found.append(dict(re.findall(r"(\w[\w ]*) begins with (\w{64})", output)))
    return found


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_values_do_not_depend_on_ranks_and_stages_and_training_is_that_of_the_whole_model(
    job: Job, tmp_path: Path
) -> None:
    found = digests(job, tmp_path, "own", [(1, 1), (4, 2)])
    assert len(found[0]) == 7
    assert len(set(found[0].values())) == 6, "two of the checkpoints hold the same values, all others differ"
    assert found[1] == found[0]


@pytest.mark.full
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("which", ["own", "libraries"])
def test_more_plans_and_models_of_hugging_face(job: Job, tmp_path: Path, which: str) -> None:
    found = digests(job, tmp_path, which, [(1, 1), (2, 2), (4, 3)])
    assert len(found[0]) >= 4
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.long
def test_no_rank_needs_memory_for_the_whole_model(job: Job, tmp_path: Path) -> None:
    output = job.run(
        "rannc-run",
        "--no-tune",
        "-np",
        "2",
        "tests/e2e/programs/meta_memory.py",
        str(tmp_path),
        RANNC_PARTITION_NUM="2",
        # What is freed goes back to the system: glibc otherwise learns to keep freed tensors of up to 32 MB in its
        # heap, and a peak would tell of the holes there (119 to 250 MB were seen) and not of what a rank holds.
        MALLOC_MMAP_THRESHOLD_=str(2**20),
    )
    found = re.findall(r"(\w+): model (\d+) built (-?\d+) held (\d+) peak (\d+) MB", output)
    assert sorted(way for way, *_ in found) == sorted(["constructor", "own", "files", "dcp"] * 2)
    for way, *numbers in found:
        model, built, held, peak = map(float, numbers)
        assert built < 0.1 * model, way
        assert 0.2 * model < held < 0.8 * model, way
        assert held < peak < 0.75 * model, way  # its share, and what measuring a layer takes


def test_a_rank_with_nothing_to_train_works_with_grad_scaler(job: Job, tmp_path: Path) -> None:
    output = job.train(2, "tests/e2e/programs/frozen_stage.py", str(tmp_path / "it"), RANNC_PARTITION_NUM="2")
    assert output.count("agrees") == 2
    assert "trains nothing agrees" in output
