"""Results as a page: docs/benchmarks.md is written by this, from the files of results and the scripts' docstrings."""

from __future__ import annotations

import ast
import json
import os
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from _goals import GOALS
from _results import shown

BENCH = Path(__file__).resolve().parent
HEAD = """\
# Benchmarks

Written by `make bench` from the files in `bench/results/`: no number here is typed.
`make bench RUNS="planner estimates"` runs only these, and leaves the others as they are; `python bench/all.py --list`
shows what each one runs. All of them take some hours.

A ratio has both sides from the same run. Numbers in parentheses are the 5th and the 95th percentile; of fewer than 20
repeats these are the smallest and the largest. *Simulated*: computed for machines that were not available. Bold: the
limit is missed. *needs-gpu*: measured by `make gpu` on a machine with a GPU. `make test-torch` tries other versions of
torch and Python ([Tests](testing.md)). Nothing was measured on a GPU yet.
"""


def grouped(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Kept lines as tables, notes and goals; rows of tables with the same title come together."""
    tables: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    goals: list[dict[str, Any]] = []
    for line in lines:
        if "note" in line:
            notes.append(line["note"])
        elif "goal" in line:
            goals.append(dict(line))
        else:
            table = tables.setdefault(line["table"], {"title": line["table"], "columns": [], "rows": []})
            if "columns" in line:
                table["columns"] = line["columns"]
            else:
                table["rows"].append(line["cells"])
    return {"tables": list(tables.values()), "notes": notes, "goals": goals}


def verdicts(runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every goal, with what runs have found of it: met, missed, simulated or needs-gpu; not-run if there is nothing."""
    told = []
    for name, goal in GOALS.items():
        numbers = [
            {"run": run, "value": each["value"], "what": each["what"], "reached": each["reached"]}
            for run, found in runs.items()
            for each in found["goals"]
            if each["goal"] == name
        ]
        verdict = "met" if all(each["reached"] for each in numbers) else "missed"
        if goal.kind != "measured":
            verdict = goal.kind
        elif not numbers:
            verdict = "not-run"
        told.append(
            {
                "goal": name, "area": goal.area, "what": goal.name, "limit": goal.limit_text, "measured": numbers,
                "verdict": verdict, "peer": goal.peer,
            }
        )  # fmt: skip
    return told


def newest(folder: Path) -> dict[str, dict[str, Any]]:
    """The newest results of each run, from all files of a folder."""
    runs: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.json")):
        runs.update(json.loads(file.read_text())["runs"])
    return runs


def page(runs: Mapping[str, dict[str, Any]], titles: Mapping[str, tuple[str, str]]) -> str:
    """The page. `titles`: title and script by the name of a run, in the order of the page."""
    parts = [HEAD, _goals(verdicts(runs))]
    described: set[str] = set()
    for name, (title, script) in titles.items():
        parts.append(f"## {title}\n")
        if name not in runs:
            parts.append(f"Not in the files of results yet: `make bench RUNS={name}`.\n")
            continue
        parts.append(_run(runs[name]))
        if script not in described:
            described.add(script)
            parts.append(f"```text\n{_docstring(script)}\n```\n")
    return "\n".join(parts)


def write(path: Path, text: str) -> None:
    """Write a file at once: whoever reads it meanwhile has the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def _goals(told: Iterable[Mapping[str, Any]]) -> str:
    lines = ["## Goals\n", *_head(["area", "goal", "limit", "measured", "verdict", "others"])]
    for each in told:
        goal = GOALS[each["goal"]]
        numbers = "; ".join(_number(goal.shown(number["value"]), number) for number in each["measured"])
        lines.append(_line([each["area"], each["what"], each["limit"], numbers, _verdict(each), each["peer"]]))
    return "\n".join([*lines, ""])


def _verdict(each: Mapping[str, Any]) -> str:
    """The verdict as the page shows it: of a simulated goal also whether its limit is kept."""
    if each["verdict"] != "simulated":
        return str(each["verdict"])
    if not each["measured"]:
        return "simulated, not-run"
    return f"simulated, {'met' if all(number['reached'] for number in each['measured']) else 'missed'}"


def _number(text: str, number: Mapping[str, Any]) -> str:
    what = f" ({number['what']})" if number["what"] else ""
    return f"{text}{what}" if number["reached"] else f"**{text}**{what}"


def _run(run: Mapping[str, Any]) -> str:
    machine, versions = run["machine"], run["versions"]
    command = " ".join(["python", f"bench/{run['script']}", *run["arguments"]])
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    before, after = run["loop_s"]
    told = (
        f"`{command}`, {run['begun']}, commit {run['commit']}, {run['seconds'] / 60:.0f} min; {machine['processor']}, "
        f"{machine['cores']} cores, {machine['memory_gib']} GiB; load average before {run['load']}; a fixed loop took "
        f"{before} s before and {after} s after; {packages}."
    )
    text = [_wrapped(told), ""]
    if run["failed"]:
        text.append("This run **failed**; its output is in the file of results. What it had found before:\n")
    for table in run["tables"]:
        text += [f"{table['title']}:\n", *_head([name for name, _ in table["columns"]])]
        forms = [form for _, form in table["columns"]]
        text += [_line([shown(cell, form) for cell, form in zip(row, forms, strict=True)]) for row in table["rows"]]
        text.append("")
    text += [_wrapped(f"- {note}", "  ") for note in run["notes"]]
    return "\n".join([*text, ""] if run["notes"] else text)


def _head(names: Iterable[str]) -> list[str]:
    names = list(names)
    return [_line(names), _line("---" for _ in names)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;').replace(chr(10), ' ') for cell in cells)} |"


def _wrapped(text: str, indent: str = "") -> str:
    return "\n".join(textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False))


def _docstring(script: str) -> str:
    return ast.get_docstring(ast.parse((BENCH / script).read_text())) or ""
