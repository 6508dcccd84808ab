"""The step auditor in real jobs: planted faults are found where they are, and there are no false alarms."""

from __future__ import annotations

import json
import re

import pytest
from job import Job
from zoo import ZOO

pytestmark = pytest.mark.ranks

FIRST, SECOND = r"block 0\.\d+ \(stage 0", r"block 1\.\d+ \(stage 1"
FOUND = {
    "swapped_microbatches": rf"argument 0, as it has arrived from rank 0, .* in {FIRST}.* piece 0 ",
    "wrong_loss_weight": rf"the loss weight \w+, as it has arrived from rank 1, .* in {SECOND}.* piece 1 ",
    "wrong_route": rf"value \w+.* as it has arrived from stage 0 on rank \d, .* in {SECOND}.* piece 5 ",
    "one_element": rf"value \w+.* as it has arrived from stage 0 on rank \d, .* in {SECOND}.* piece 6 ",
    "rounded_on_the_way": rf"value \w+.* as it has arrived from stage 0 on rank \d, .* in {SECOND}.* piece 1 ",
    "scaled_gradient": rf"the gradient of value \w+.* as it has arrived, .* \(1 of .* in {FIRST}.* piece 2 ",
    "gradient_of_nothing": rf"the gradient of value \w+.* as it has arrived, .* \(1 of .* in {FIRST}.* piece 7 ",
    "reversed_rows": rf"the gradient of value \w+.* as it has arrived, .* in {FIRST}.* piece 4 ",
    "gradient_counted_twice": rf"the gradient of value \w+.* as it has arrived, .* \(1 of .* in {FIRST}.* piece 3 ",
    "missed_reduction": rf"the gradient of second\.\d\.\w+ after its reduction .* in {SECOND}",
    "wrong_scale": rf"the gradient of value \w+.* as it has arrived, .* \(1 of .* in {SECOND}.* piece 0 ",
    "stale_buffer": rf"buffer weights after the step .* in {SECOND}",
    "buffer_written_twice": rf"buffer weights after the step .* in {SECOND}.* piece 0 ",
    "lost_tie": rf"the gradient of embedding\.weight after its reduction .* in {FIRST}",
    "tie_apart": rf"embedding\.weight has other values than on rank 0, in {FIRST}.* rank 2",
    "stale_parameter": rf"second\.3\.weight of the model is not what the stage has computed with, in {SECOND}.* rank 3",
    "other_random_numbers": rf"value \w+.* in {SECOND}.* piece 3 ",
    "outputs_out_of_order": rf"output 1 .* in {SECOND}.* piece [15] .* rank 1",
    "loss_without_a_piece": rf"output 0 .* in {SECOND}",
    "wrong_factor": rf"the gradient that second\.\d\.\w+ was given .* \(1 of .* in {SECOND}",
    "accumulated_twice": rf"the gradient of first\.0\.weight before its reduction .* \(1 of .* in {FIRST}.* rank 2",
    "not_delivered": rf"the gradient that second\.0\.bias was given .* in {SECOND}",
    "wrong_input_gradient": r"the gradient of argument 1 .* rank 2",
}
"""What is said of each fault of programs/faults.py."""

FEW = ["gpt2", "bert, pairs", "t5", "vit", "gru, both ways", "u-net", "siamese", "mixtral"]
"""Models of the zoo that are audited in every run of the tests."""
JOBS = 8
"""Jobs that audit all of them."""
ALL = [[entry.name for entry in ZOO[number::JOBS]] for number in range(JOBS)]


@pytest.fixture(scope="module")
def told(job: Job) -> dict[str, str]:
    plan = {"RANNC_PARTITION_NUM": "2", "RANNC_REPLICA_NUM": "2", "RANNC_PIPELINE_NUM": "2", "RANNC_SCHEDULE": "1f1b"}
    output = job.train(4, "tests/e2e/programs/faults.py", **plan)
    (line,) = re.findall(r"faults: (.*)", output)
    assert re.search(r"Step 2 equals its replay: \d+ values, \d+ gradients and [1-9]\d* buffers of 2 blocks", output)
    found: dict[str, str] = json.loads(line)
    return found


def test_a_step_without_a_fault_is_equal_and_all_faults_are_expected_here(told: dict[str, str]) -> None:
    assert told.pop("none") == ""
    assert told.keys() == FOUND.keys()
    assert len(FOUND) >= 20


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_found_where_it_is(told: dict[str, str], name: str) -> None:
    assert re.search(FOUND[name], told[name]), told[name]


@pytest.mark.parametrize(
    "plan",
    [
        {"RANNC_PARTITION_NUM": "2"},
        {"RANNC_PARTITION_NUM": "1", "RANNC_CHECKPOINTING": "true", "RANNC_VERIFY_RECOMP": "true"},
    ],
    ids=["two stages", "replicas that recompute"],
)
@pytest.mark.parametrize(
    "models",
    [FEW, *(pytest.param(each, marks=pytest.mark.full) for each in ALL)],
    ids=["few", *(f"all{number}" for number in range(JOBS))],
)
def test_no_false_alarm_on_the_zoo(job: Job, models: list[str], plan: dict[str, str]) -> None:
    output = job.train(
        2, "tests/e2e/programs/audited_zoo.py", *models, RANNC_VERIFY_STEP="2", RANNC_CHECK_NAN="off", **plan
    )
    lines = re.findall(r"zoo: (.*): (audited|refused|not trained|ALARM)(.*)", output)
    assert [line[0] for line in lines if line[1] == "audited"] == [each.name for each in ZOO if each.name in models], (
        output
    )


def test_the_flag_ends_a_job_whose_step_differs(job: Job) -> None:
    """As does a block that recomputes other values."""
    script = "tests/e2e/programs/unsteady.py"
    code, output = job.end("rannc-run", "-np", "2", "--verify", "2", script, "planted")
    assert code != 0
    assert "AuditError: step 2 differs from its replay: value " in output
    code, output = job.end("rannc-run", "-np", "1", script, RANNC_VERIFY_RECOMP="true", RANNC_CHECKPOINTING="true")
    assert code != 0
    assert re.search(
        r"AuditError: verify_recomp: value \w+ .* differs by up to .* segment \d+, piece 0, rank 0", output
    )
