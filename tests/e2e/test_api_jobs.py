"""The public API on real ranks; each program asserts what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import Job
from thinned import first

pytestmark = pytest.mark.ranks

TWO = {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "2"}


@pytest.mark.long
def test_clipping_is_over_the_whole_model(job: Job) -> None:
    output = job.train(2, "tests/e2e/programs/clipping.py", **TWO)
    assert output.count("clipping is right on rank") == 2


def test_undeploying_changes_nothing_in_training(job: Job) -> None:
    output = job.train(2, "tests/e2e/programs/undeploying.py", **TWO)
    assert output.count("undeploying is right on rank") == 2


@pytest.mark.long
def test_several_models_and_hooks(job: Job) -> None:
    output = job.train(2, "tests/e2e/programs/several.py", RANNC_PIPELINE_NUM="2")
    assert output.count("several models are right on rank") == 2
    for model in ("Sequential", "Sequential 2", "Judge"):
        assert f"[RaNNCModule] [info] {model}: Plan" in output, model


@pytest.mark.parametrize("stages", first(1, ["2", "1"]))
def test_frozen_parameters_that_calls_write(job: Job, stages: str) -> None:
    program = "tests/e2e/programs/written_parameters.py"
    outputs = [job.train(2, program, RANNC_PARTITION_NUM=stages) for _ in range(2)]  # traces are cached then
    assert all(output.count("written parameters are right on rank") == 2 for output in outputs)


@pytest.mark.long
def test_cut_points_and_dropout(job: Job) -> None:
    output = job.train(2, "tests/e2e/programs/cut_points.py", RANNC_PIPELINE_NUM="2")
    assert output.count("cut points are right on rank") == 2


@pytest.mark.long
@pytest.mark.parametrize("stages", ["1", "2"])
def test_values_of_other_ranks_are_not_read(job: Job, stages: str) -> None:
    output = job.train(2, "tests/e2e/programs/absent_values.py", stages, RANNC_PARTITION_NUM=stages)
    assert output.count("absent values are right on rank") == 2


@pytest.mark.long
@pytest.mark.parametrize("stages", ["1", "2"])
def test_averages_by_hand_are_right_or_an_error(job: Job, stages: str) -> None:
    output = job.train(2, "tests/e2e/programs/naive_averages.py", stages, RANNC_PARTITION_NUM=stages)
    assert output.count(" is right") == 8


@pytest.mark.parametrize(
    ("ranks", "stages"),
    first(0, [(1, "1"), (2, "1"), (2, "2")]),
)
def test_the_model_inside_runs_the_plan(job: Job, ranks: int, stages: str, tmp_path: Path) -> None:
    output = job.train(ranks, "tests/e2e/programs/inner_calls.py", stages, str(tmp_path), RANNC_PARTITION_NUM=stages)
    assert output.count(" is right") == 3 * ranks
    assert output.count("methods that call the model are right") == ranks
    told = (
        "optimizer.step found a gradient of body.0.weight, but no backward went through the RaNNCModule since the last"
    )
    assert output.count(told) == (ranks == 2 and stages == "1")


@pytest.mark.long
@pytest.mark.parametrize("stages", ["1", "2"])
def test_averages_of_a_wrapped_model(job: Job, stages: str, tmp_path: Path) -> None:
    def run(ranks: int, what: str, stages: str) -> None:
        program, folder = "tests/e2e/programs/averaged_model.py", str(tmp_path / "checkpoint")
        output = job.train(ranks, program, stages, folder, what, RANNC_PARTITION_NUM=stages)
        assert output.count("averages are right on rank") == ranks

    run(2, "train", stages)
    run(2, "save", stages)
    run(1, "before", "1")
    run(3, "after", "3" if stages == "2" else "1")
    run(2, "before", "2")


@pytest.mark.parametrize("stages", [pytest.param("1", marks=pytest.mark.long), "2"])
def test_batches_with_ids_and_numbers_that_change(job: Job, stages: str) -> None:
    program = "tests/e2e/programs/plain_arguments.py"
    output = job.train(2, program, stages, RANNC_PARTITION_NUM=stages, RANNC_CACHE="off")
    assert output.count("plain arguments are right on rank") == 2


@pytest.mark.parametrize("batch", ["own", "shared"])
@pytest.mark.parametrize("stages", first(1, ["2", "1"]))
def test_a_script_written_for_rannc(job: Job, stages: str, batch: str) -> None:
    output = job.train(2, "tests/e2e/programs/rannc_script.py", stages, batch, RANNC_PARTITION_NUM=stages)
    assert output.count("a script for RaNNC is right on rank") == 2
    assert output.count("recreate_all_communicators has no effect") >= 1


@pytest.mark.parametrize("stages", first(1, ["2", "1"]))
def test_a_loop_of_accelerate(job: Job, stages: str, tmp_path: Path) -> None:
    output = job.train(2, "tests/e2e/programs/accelerated.py", str(tmp_path), RANNC_PARTITION_NUM=stages)
    assert output.count("Accelerate is right on rank") == 2


@pytest.mark.parametrize("stages", first(1, ["2", "1"]))
def test_a_wrapped_model_is_converted_or_refuses(job: Job, stages: str) -> None:
    output = job.train(2, "tests/e2e/programs/conversions.py", RANNC_PARTITION_NUM=stages)
    assert output.count("conversions are right on rank") == 2
