"""What two plans do differently."""

from __future__ import annotations

import msgspec
from shown_plans import planned

from rannd.plan.deployment import Deployment
from rannd.plan.plan_text import time_text
from rannd.runner.page.plan_difference import against, differences_of, differing


def rows(this: Deployment, other: Deployment) -> dict[str, tuple[str, str, str]]:
    return {row.what: (row.this, row.other, row.change) for row in differing(differences_of(this, other))}


def test_a_plan_does_not_differ_from_itself() -> None:
    plan = planned(partition_num=2)
    found = rows(plan, plan)
    assert set(found) == {"operators in another stage"}
    assert found["operators in another stage"][0] == "0"


def test_each_quantity_that_differs_is_a_row_with_its_ratio() -> None:
    plan = planned(partition_num=2, pipeline_num=4, memory=10**9)
    slower = msgspec.structs.replace(plan, step_us=plan.step_us * 1.25, microbatches=2, zero=1, schedule="gpipe")
    found = rows(slower, plan)
    assert found["step"] == (time_text(plan.step_us * 1.25), time_text(plan.step_us), "+25.0 %")
    assert found["microbatches"] == ("2", "4", "-50.0 %")
    assert found["ZeRO"][:2] == ("1", "no")
    assert found["schedule"][:2] == ("gpipe", plan.schedule)
    assert "stages" not in found


def test_stages_are_compared_one_by_one() -> None:
    one, two = planned(partition_num=1, memory=10**9), planned(partition_num=2, memory=10**9)
    found = rows(two, one)
    assert found["stages"][:2] == ("2", "1")
    assert found["stage 1: modules"] == (two.stages[1].modules, "", "")
    assert found["stage 0: operators"][:2] == (str(len(two.stages[0].ops)), str(len(one.stages[0].ops)))
    assert found["operators in another stage"][0] == str(len(two.stages[1].ops))


def test_plans_of_other_graphs_and_batches_are_told() -> None:
    plan = planned(partition_num=2)
    other = msgspec.structs.replace(plan, graph_hash="other")
    assert against(plan, other, "k", "t").note == "They are plans of different graphs."
    assert "operators in another stage" not in rows(plan, other)
    assert "different batches" in against(plan, msgspec.structs.replace(plan, batch_rows=8), "k", "t").note
    assert against(plan, plan, "k", "t").note == ""
