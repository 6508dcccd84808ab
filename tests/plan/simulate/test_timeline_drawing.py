"""Drawn timelines of every schedule, compared as text with the files in golden/.

A changed schedule shows as a changed drawing. This command, in the root of the repository, writes the files anew; look
at the difference before it is kept:

    PYTHONPATH=.:tests/plan python tests/plan/simulate/test_timeline_drawing.py
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from plan_costs import chain, virtual

from rannd.plan.schedule.program import Layout
from rannd.plan.schedule.program_checker import check
from rannd.plan.schedule.program_text import to_text
from rannd.plan.schedule.schedules import planned_program
from rannd.plan.simulate.simulator import simulate
from rannd.plan.simulate.step_costs import StepCosts
from rannd.plan.simulate.timeline import COMPUTE, Event
from rannd.plan.simulate.timeline_drawing import draw

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "plan" / "golden"

FOUR = chain(4, 2)
UNEQUAL = Layout(4, 2, ((0, 2), (1,), (3,)), ((-1, 0), (0, 1), (1, 2)), ((0, 1), (1, 2)))
REPLICAS = Layout(4, 2, ((0, 2), (1, 3)), ((-1, 0), (0, 1)), ((0, 1),))
TIED = chain(3, 2, edges=((0, 1), (0, 2), (1, 2)), grad_edges=((0, 1), (0, 2), (1, 2)), tied=((0, 2),))
RECOMPUTED = virtual(TIED, backward_us=(2.0, 2.0, 3.0), weight_us=(1.0, 1.0, 0.0), tied_us=((2.0,),))

CASES: Mapping[str, tuple[str, Layout, StepCosts]] = {
    **{f"{schedule}_4": (schedule, FOUR, virtual(FOUR)) for schedule in ("gpipe", "1f1b", "zb_h1")},
    **{f"{schedule}_4_transfers": (schedule, FOUR, virtual(FOUR, transfer=1.0)) for schedule in ("1f1b", "zb_h1")},
    **{f"{schedule}_unequal": (schedule, UNEQUAL, virtual(UNEQUAL)) for schedule in ("gpipe", "1f1b", "zb_h1")},
    "1f1b_replicas": ("1f1b", REPLICAS, virtual(REPLICAS, reduce_us=((2.0, 2.0, 2.0, 2.0), (1.0,)))),
    "zb_h1_skip_tied_recomputed": ("zb_h1", TIED, RECOMPUTED),
}


def drawing(name: str) -> str:
    schedule, layout, costs = CASES[name]
    program = planned_program(schedule, layout, costs.split)
    check(program)
    played = simulate(program, costs, record=True)
    head = to_text(program).splitlines()
    lines = [line for line in head if not line.startswith("slot")]
    idle, peaks = ([f"{value:g}" for value in values] for values in (played.idle_us, played.peak_bytes))
    lines += ["", draw(played.events, layout.world, 1.0)]
    lines += [f"step {played.step_us:g}, idle {' '.join(idle)}, most pieces {' '.join(peaks)}", ""]
    return "\n".join(lines)


@pytest.mark.parametrize("name", CASES)
def test_timelines_are_as_drawn(name: str) -> None:
    assert drawing(name) == (GOLDEN / f"{name}.txt").read_text()


def test_nothing_is_left_of_other_cases() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


def test_the_command_writes_the_drawings_anew(tmp_path: Path) -> None:
    """As the text at the top has it."""
    assert __doc__
    command = next(line.strip() for line in __doc__.splitlines() if line.endswith(".py"))
    (tmp_path / "rannd").symlink_to(ROOT / "rannd")
    shutil.copytree(ROOT / "tests" / "plan", tmp_path / "tests" / "plan")
    golden = tmp_path / GOLDEN.relative_to(ROOT)
    for path in golden.iterdir():
        path.write_text("old")
    command = command.replace(" python ", f" {shlex.quote(sys.executable)} ")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert {path.name: path.read_text() for path in golden.iterdir()} == {
        path.name: path.read_text() for path in GOLDEN.iterdir()
    }


def test_columns_show_what_runs_in_their_middle() -> None:
    events = [
        Event(0, COMPUTE, 0.0, 14.0, "F0"),
        Event(0, COMPUTE, 14.0, 3.0, "F1"),
        Event(1, COMPUTE, 16.0, 24.0, "B10"),
    ]
    assert draw(events, 2, 10.0) == "slot 0  F0   F1   .    .\nslot 1  .    .    B10  --\n"


if __name__ == "__main__":
    for each in CASES:
        (GOLDEN / f"{each}.txt").write_text(drawing(each))
