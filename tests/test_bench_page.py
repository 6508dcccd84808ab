"""docs/benchmarks.md is written by bench/all.py: it says what the files of results have, and nothing is left out."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "bench"
NOT_RUN = {"all.py", "gpu.py"}
"""What runs the others, and what needs a GPU."""
PARTS = ("all", "_page", "_results", "_goals", "_machine")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of bench/ that write the page."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield {name: importlib.import_module(name) for name in PARTS}
    for name in PARTS:
        sys.modules.pop(name)


def test_nothing_on_the_page_is_typed(bench: dict[str, ModuleType]) -> None:
    runs = {run.name: (run.title, run.script) for run in bench["all"].RUNS}
    written = bench["_page"].page(bench["_page"].newest(BENCH / "results"), runs)
    assert (ROOT / "docs" / "benchmarks.md").read_text() == written, "run `python bench/all.py --page`"


def test_every_script_is_run_and_every_goal_is_looked_for(bench: dict[str, ModuleType]) -> None:
    scripts = {file.name for file in BENCH.glob("[!_]*.py")} - NOT_RUN
    assert {run.script for run in bench["all"].RUNS} == scripts
    text = "".join(file.read_text() for file in BENCH.glob("*.py") if file.name not in ("_goals.py", "all.py"))
    for name, goal in bench["_goals"].GOALS.items():
        said = re.sub(r"^planner-\d+$", "planner-{world}", name)
        assert goal.kind == "needs-gpu" or f'"{said}"' in text, name


def test_rows_goals_and_verdicts_reach_the_page(bench: dict[str, ModuleType], tmp_path, monkeypatch, capsys) -> None:
    """Through the file that a script keeps, with numbers as they are."""
    results = bench["_results"]
    monkeypatch.setenv(results.KEPT, str(tmp_path / "kept"))
    for part in range(2):  # two jobs of a script that go on with one table
        table = results.Table("Steps", "side", ("step", "{:.1f} ms"), "ratio")
        table.row(f"side {part}", results.Spread.of([1.0, 2.0, 4.0]), None)
    results.note("On | a machine.")
    assert results.found("planner-8", 9.96)
    assert results.found("value-even", 1.5)
    assert not results.found("value-rannc", 1.0)
    assert not results.found("zero-1", 0.9, "once")
    assert results.found("zero-1", 0.98, "twice")
    assert not results.found("planner-64", float("nan"))
    said = capsys.readouterr().out
    assert "2.0 (1.0 to 4.0) ms" in said
    assert "MISSED" in said
    lines = [json.loads(line) for line in (tmp_path / "kept").read_text().splitlines()]
    run = {
        "script": "page.py", "arguments": ["--x"], "begun": "today", "seconds": 60.0, "load": 0.1, "loop_s": [0.1, 0.2],
        "commit": "abc", "machine": bench["_machine"].machine(), "versions": bench["_machine"].versions(),
        "failed": "", **bench["_page"].grouped(lines),
    }  # fmt: skip
    verdicts = {each["goal"]: each["verdict"] for each in bench["_page"].verdicts({"one": run})}
    assert verdicts["planner-8"] == "met"
    assert verdicts["zero-1"] == verdicts["planner-64"] == "missed"
    assert verdicts["zero-2"] == "not-run"
    assert verdicts["gpu-eager"] == "needs-gpu"
    assert verdicts["value-rannc"] == verdicts["value-even"] == verdicts["value-worst"] == "simulated"
    page = bench["_page"].page({"one": run}, {"one": ("First", "page.py"), "two": ("Second", "page.py")})
    assert "| side 0 | 2.0 (1.0 to 4.0) ms |  |\n| side 1 | 2.0 (1.0 to 4.0) ms |  |" in page
    assert "| at least 0.970 | **0.900** (once); 0.980 (twice) | missed |" in page
    assert "| at least 1.250 | 1.500 | simulated, met |" in page
    assert "| at least 1.100 | **1.000** | simulated, missed |" in page
    assert "| at least 0.999 |  | simulated, not-run |" in page
    assert "- On | a machine." in page
    assert "Not in the files of results yet: `make bench RUNS=two`." in page
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        table.row("one", 2)


def test_a_run_that_fails_is_told_and_does_not_keep_others_from_running(
    bench: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "bench"
    scripts.mkdir()
    (scripts / "wrong.py").write_text(
        f'"""Fails."""\nimport sys\nsys.path.insert(0, {str(BENCH)!r})\n'
        "from _results import found\nfound('page', 1.0)\nsys.exit('no such thing')\n"
    )
    (scripts / "right.py").write_text('"""Works."""\n')
    every = bench["all"]
    for module in (every, bench["_page"]):
        monkeypatch.setattr(module, "BENCH", scripts)
    monkeypatch.setattr(every, "RUNS", (every.Run("a", "A", "wrong.py"), every.Run("b", "B", "right.py")))
    out, results = tmp_path / "page.md", tmp_path / "results"
    monkeypatch.setattr(sys, "argv", ["all.py", "--results", str(results), "--out", str(out)])
    with pytest.raises(SystemExit, match="failed: a"):
        every.main()
    (file,) = results.glob("*.json")
    told = json.loads(file.read_text())
    assert told["runs"]["a"]["failed"].endswith("no such thing\n")
    assert not told["runs"]["b"]["failed"]
    assert {each["goal"]: each["verdict"] for each in told["goals"]}["page"] == "met"
    assert "This run **failed**" in out.read_text()
