"""The step auditor in real jobs: planted faults are found where they are, and there are no false alarms."""

from __future__ import annotations

import json
import re

import pytest
from job import FORK, Job
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

SHARED = r"argument 0, as it has arrived from rank 0, .* in the mini-batch of rank 3\."
WAYS = {
    "autocast": [
        "rounded_on_the_way",
        "gradient_counted_twice",
        "other_random_numbers",
        "lost_tie",
        "wrong_input_gradient",
    ],
    "scaled": [
        "wrong_route",
        "scaled_gradient",
        "wrong_scale",
        "missed_reduction",
        "accumulated_twice",
        "wrong_factor",
    ],
    "outside": ["buffer_written_twice", "gradient_of_nothing", "other_random_numbers", "outputs_out_of_order"],
    "shared": ["rows_of_another_rank", "wrong_loss_weight", "loss_without_a_piece", "lost_tie", "wrong_input_gradient"],
    "shared outside": ["rows_of_another_rank", "reversed_rows", "missed_reduction", "outputs_out_of_order"],
}
"""Faults of other ways to train: under autocast, with a GradScaler, a loss of the script's, a shared mini-batch."""

FEW = ["gpt2", "bert, pairs", "t5", "vit", "gru, both ways", "u-net", "siamese", "mixtral"]
"""Models of the zoo that are audited in every run of the tests."""
TWO_OF_TWO = {
    "RANNC_PARTITION_NUM": "2",
    "RANNC_REPLICA_NUM": "2",
    "RANNC_PIPELINE_NUM": "2",
    "RANNC_SCHEDULE": "1f1b",
}
JOBS = 8
"""Jobs that audit all of them."""
ONE = "lstm, packed"
"""Cannot be cut into two stages."""
ALL = [[entry.name for entry in ZOO[number::JOBS]] for number in range(JOBS)]


@pytest.fixture(scope="module")
def told(job: Job) -> dict[str, str]:
    return _planted(job, "plain")


def _planted(job: Job, way: str, *faults: str) -> dict[str, str]:
    output = job.train(4, "tests/e2e/programs/faults.py", way, *faults, **TWO_OF_TWO)
    (line,) = re.findall(r"faults: (.*)", output)
    assert re.search(r"Step 2 equals its replay: \d+ values, \d+ gradients and [1-9]\d* buffers of 2 blocks", output)
    found: dict[str, str] = json.loads(line)
    return found


def test_a_step_without_a_fault_is_equal_and_all_faults_are_expected_here(told: dict[str, str]) -> None:
    assert told.pop("none") == told.pop("rows_of_another_rank") == ""
    assert told.keys() == FOUND.keys()
    assert len(FOUND) >= 20


@pytest.mark.parametrize("name", FOUND)
def test_a_fault_is_found_where_it_is(told: dict[str, str], name: str) -> None:
    assert re.search(FOUND[name], told[name]), told[name]


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    [pytest.param(each, marks=() if each in ("autocast", "shared outside") else pytest.mark.full) for each in WAYS],
)
def test_so_it_is_under_autocast_and_where_ranks_share_a_mini_batch(job: Job, way: str) -> None:
    found = _planted(job, way, *WAYS[way])
    assert found.pop("none") == ""
    assert found.keys() == set(WAYS[way])
    place = {"rows_of_another_rank": SHARED, **FOUND}
    if "outside" in way:  # the model's only output
        place["outputs_out_of_order"] = place["outputs_out_of_order"].replace("output 1", "output 0")
    for name, text in found.items():
        assert re.search(place[name], text), (name, text)


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
    [pytest.param(FEW, marks=pytest.mark.long), *(pytest.param(each, marks=pytest.mark.full) for each in ALL)],
    ids=["few", *(f"all{number}" for number in range(JOBS))],
)
def test_no_false_alarm_on_the_zoo(job: Job, models: list[str], plan: dict[str, str]) -> None:
    output = job.train(2, "tests/e2e/programs/audited_zoo.py", *models, RANNC_VERIFY_STEP="2", **plan)
    lines = re.findall(r"zoo: (.*): (audited|refused|not trained|ALARM)(.*)", output)
    cut = [
        each.name for each in ZOO if each.name in models and (plan["RANNC_PARTITION_NUM"] == "1" or each.name != ONE)
    ]
    assert [line[0] for line in lines if line[1] == "audited"] == cut, output
    assert [line[:2] for line in lines if line[1] != "audited"] == [(ONE, "not trained")] * (len(lines) - len(cut))
    assert "computes NaN" not in output


VIRTUAL = {"RANNC_PARTITION_NUM": "4", "RANNC_VIRTUAL_STAGES": "2"}
KINDS: dict[str, dict[str, str]] = {
    "gpipe": {"RANNC_PARTITION_NUM": "2", "RANNC_SCHEDULE": "gpipe"},
    "zb_h1": {"RANNC_PARTITION_NUM": "2", "RANNC_SCHEDULE": "zb_h1"},
    "zb_v": {**VIRTUAL, "RANNC_SCHEDULE": "zb_v"},
    "interleaved_1f1b": {**VIRTUAL, "RANNC_SCHEDULE": "interleaved_1f1b"},
    **{f"ZeRO {stage}": {"RANNC_PARTITION_NUM": "1", "RANNC_ZERO_STAGE": str(stage)} for stage in (1, 2, 3)},
    "offloading": {
        "RANNC_PARTITION_NUM": "1",
        "RANNC_CHECKPOINTING": "true",
        "RANNC_OFFLOAD_OPTIMIZER": "true",
        "RANNC_OFFLOAD_PARAMS": "true",
        "RANNC_OFFLOAD_ACTIVATIONS": "true",
    },
}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [pytest.param(each, marks=() if each in ("zb_v", "ZeRO 3", "offloading") else pytest.mark.full) for each in KINDS],
)
def test_plans_of_every_kind_are_audited(job: Job, kind: str) -> None:
    """Tied weights included."""
    output = job.train(2, "tests/e2e/programs/audited_zoo.py", "gpt2", RANNC_VERIFY_STEP="2", **KINDS[kind])
    assert "zoo: gpt2: audited" in output, output


def test_a_step_that_a_job_does_not_reach_is_told(job: Job) -> None:
    """So it is with one whose timeline is wanted."""
    script = (FORK, "examples/tutorial.py", "8", "16", "2")
    output = job.run("rannc-run", "-np", "2", "--verify", "9", *script, RANNC_EVENT_TRACE_FILE="step.json")
    assert output.count("No timeline was written to step.json (event_trace_file): it is that of step 10 after") == 1
    assert output.count("verify_step: step 9 was not audited: the model had 3 training calls") == 1


@pytest.mark.long
def test_the_flag_ends_a_job_whose_step_differs(job: Job) -> None:
    """As does a block that recomputes other values."""
    script = "tests/e2e/programs/unsteady.py"
    code, output = job.end("rannc-run", "-np", "2", "--verify", "2", script, "planted")
    assert code != 0
    assert "AuditError: step 2 differs from its replay: value " in output
    assert "was not audited" not in output
    code, output = job.end("rannc-run", "-np", "1", script, RANNC_VERIFY_RECOMP="true", RANNC_CHECKPOINTING="true")
    assert code != 0
    assert re.search(
        r"AuditError: verify_recomp: value \w+ .* differs by up to .* segment \d+, piece 0, rank 0", output
    )
