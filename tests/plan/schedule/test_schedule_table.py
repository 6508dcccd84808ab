"""The table of schedules: its properties beside what the simulator plays, and that nothing else knows a name of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from plan_graphs import chain

from rannd.config import ITEMS
from rannd.errors import PlanError
from rannd.graph.fx.ir import Size
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Slot
from rannd.plan.plan_options import AUTO, PlanOptions
from rannd.plan.run_modes import RunMode, check_known
from rannd.plan.schedule.schedules import ALL_SCHEDULES, SCHEDULES, Schedule
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES
from rannd.plan.search.planner import plan
from rannd.plan.simulate.layout import layout_of, loss_layout, step_costs
from rannd.plan.simulate.simulator import predict
from rannd.plan.stage_costs import microbatch_counts, shared_tables
from rannd.profile.costs import BlockCost, CostTable, LinkCost

SOURCES = Path(shared_tables.__file__).parents[2]
STAGES, PIECES = 4, 12
FORWARD, BACKWARD = (30, 60, 30, 30), (50, 50, 90, 50)


def _difference(schedule: str, *, equal: bool) -> str:
    """What E says of a pipeline and the simulator does not; '' if they agree."""
    graph = chain(STAGES)
    times = zip(FORWARD, BACKWARD, strict=True)
    blocks = [BlockCost(Size(30), Size(50), Size(0, 100_000), Size(20))] * STAGES
    if not equal:
        blocks = [BlockCost(Size(forward), Size(back), Size(0, 100_000), Size(20)) for forward, back in times]
    costs = CostTable(tuple(blocks), LinkCost(0, 1e12, 0, 1e12))
    found = plan(
        graph, make_blocks(Partitioning.of(graph), PlanOptions(), world=STAGES), costs, world=STAGES,
        slots=tuple(Slot(0, device) for device in range(STAGES)), batch_rows=4 * PIECES, memory_bytes=10**15,
        options=PlanOptions(pipeline_num=PIECES // STAGES, partition_num=STAGES), way=RunMode(schedule),
    )  # fmt: skip
    layout = loss_layout(layout_of(graph, found))
    result = predict(schedule, layout, step_costs(graph, found, costs.link))
    for number, stage in enumerate(found.stages):
        most = max(result.peak_bytes[slot] for slot in stage.slots)
        if not 0.98 * stage.estimate.total_bytes <= most <= 1.02 * stage.estimate.total_bytes:
            return f"stage {number}: {stage.estimate.total_bytes} bytes planned, {most} played"
    # What zb_h1 may delay fills more of the first bubble than E counts.
    if not 0.92 * found.e_us <= result.step_us <= 1.02 * found.e_us:
        return f"{found.e_us} us planned, {result.step_us} played"
    return ""


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_e_and_its_memory_are_the_simulators_for_every_schedule(schedule: str) -> None:
    for equal in (True, False):
        assert _difference(schedule, equal=equal) == "", equal


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
@pytest.mark.parametrize("wrong", ["takes_turns", "delays_weights"])
def test_a_wrong_property_of_a_schedule_would_be_seen(
    schedule: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Schedule = ALL_SCHEDULES[schedule]
    changed = msgspec.structs.replace(right, **{wrong: not getattr(right, wrong)})
    for place in (shared_tables, microbatch_counts):
        monkeypatch.setattr(place, "ALL_SCHEDULES", {**ALL_SCHEDULES, schedule: changed})
    assert any(_difference(schedule, equal=equal) for equal in (True, False))


def _named() -> Iterator[tuple[str, bool]]:
    """Files with the name of a schedule as a string, and whether it is compared there."""
    for path in sorted(SOURCES.rglob("*.py")):
        tree = ast.parse(path.read_text())
        file = path.relative_to(SOURCES).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and node.value in ALL_SCHEDULES:
                yield file, False
            if isinstance(node, ast.Compare | ast.match_case):
                inner = (each for each in ast.walk(node) if isinstance(each, ast.Constant))
                if any(each.value in ALL_SCHEDULES for each in inner):
                    yield file, True


def test_nothing_but_the_table_knows_a_schedule_by_its_name() -> None:
    found = list(_named())
    assert not [file for file, compared in found if compared]
    assert {file for file, _ in found} == {"plan/schedule/schedules.py", "config/table.py"}


def test_the_configuration_has_the_schedules_that_can_be_run() -> None:
    item = ITEMS["schedule"]
    assert item.choices == (AUTO, *SCHEDULES, *VIRTUAL_SCHEDULES)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (RunMode("zb"), "no schedule is named 'zb'; use one of 1f1b, gpipe, zb_h1"),
        (RunMode("zb", 2), "no schedule is named 'zb'"),
        (RunMode("1f1b", 4), "'1f1b' cannot be planned with ZeRO stage 4: stages are 0 to 3"),
        (RunMode("zb_h1", 3), "'zb_h1' cannot be planned with ZeRO stage 3: gradients are sharded"),
    ],
)
def test_an_unknown_run_mode_is_refused_for_what_is_wrong_with_it(way: RunMode, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_known(way)
