"""A better plan is taken between two steps of a training, which loses nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from job import FROM_CACHE, Job
from job_cache import LEARNING as PLAN

pytestmark = pytest.mark.ranks

PROGRAM, UNEVEN = "tests/e2e/programs/replanned.py", "tests/e2e/programs/uneven_plan.py"
FOUND, TAKEN = "Measured costs make another plan", "The better plan is taken now"


@pytest.fixture
def uneven(job: Job) -> Callable[[], None]:
    """Makes a plan, of which the first stage has most of the layers."""

    def make() -> None:
        print(job.train(2, PROGRAM, "plain", "3", **PLAN))
        print(job.run(sys.executable, UNEVEN, **PLAN))

    return make


@pytest.mark.long
@pytest.mark.parametrize("way", ["plain", "accumulate", "both"])
def test_a_training_goes_on_with_a_better_plan_as_if_it_had_been_there(
    job: Job, uneven: Callable[[], None], way: str
) -> None:
    uneven()
    output = job.train(2, PROGRAM, way, **PLAN, RANNC_REPLAN="now")
    assert FROM_CACHE in output
    assert output.count(FOUND) == output.count(TAKEN) == output.count("Plan after measured steps: 2 stages") == 1
    assert re.search(r"STEPS \d+, 16 of them with another plan", output)
    assert FOUND not in job.train(2, PROGRAM, way, "3", **PLAN), "the next run begins with it"


@pytest.mark.long
def test_a_change_that_does_not_pay_is_left_to_the_next_run(job: Job, uneven: Callable[[], None]) -> None:
    uneven()
    output = job.train(2, PROGRAM, "refused", **PLAN, RANNC_REPLAN="now")
    assert FOUND in output
    assert TAKEN not in output
    assert re.search(r"it saves [\d.]+ s of the remaining \d+ calls, a change takes 1000.0 s", output)
    assert ", 0 of them with another plan" in output


@pytest.mark.long
def test_a_model_that_cannot_be_undeployed_goes_on_with_its_plan(job: Job, uneven: Callable[[], None]) -> None:
    uneven()
    output = job.train(2, PROGRAM, "unsendable", **PLAN, RANNC_REPLAN="now")
    assert FOUND in output
    assert output.count("The next run takes the better plan: ") == 1
    assert ", 0 of them with another plan" in output


@pytest.mark.long
def test_a_training_that_is_saved_meanwhile_goes_on_with_the_better_plan(
    job: Job, uneven: Callable[[], None], tmp_path: Path
) -> None:
    """Checkpoints are on their way, and ranks keep each other's states, when the plan changes."""
    uneven()
    output = job.train(2, PROGRAM, "saved", "0", str(tmp_path), **PLAN, RANNC_REPLAN="now", RANNC_SNAPSHOTS="neighbour")
    assert output.count(TAKEN) == 1
    done = re.search(r"STEPS (\d+), 16 of them with another plan", output)
    assert done
    again = job.train(2, PROGRAM, "saved", str(int(done[1]) + 3), str(tmp_path), **PLAN)
    assert f"Going on after step {done[1]}" in again
    assert re.search(r"STEPS 3, 0 of them with another plan", again)


@pytest.mark.long
def test_a_plan_that_is_not_for_the_graph_is_not_taken_and_nothing_is_lost(
    job: Job, uneven: Callable[[], None]
) -> None:
    uneven()
    output = job.train(2, PROGRAM, "foreign", **PLAN, RANNC_REPLAN="now")
    assert output.count("The better plan cannot be used: the deployment was made for the graph 000000000000") == 1
    assert output.count(FROM_CACHE) == 2, "the one that has taken the first one's place there"
    assert re.search(r"STEPS \d+, 16 of them with another plan", output)


def test_what_has_no_effect_is_told_once(job: Job) -> None:
    tutorial = ("examples/tutorial.py", "8", "32", "4")
    short = job.train(2, *tutorial, RANNC_REPLAN="now")
    assert short.count("replan=now had no effect: steps are measured from the second to number 21") == 1
    never = job.train(2, *tutorial, RANNC_REPLAN="now", RANNC_CALIBRATE_AFTER="0")
    assert never.count('replan = "now" (RANNC_REPLAN) has no effect with calibrate_after = 0') == 1
    assert "replan=now had no effect" not in never
