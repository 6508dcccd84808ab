"""A training writes the timeline of a step, measured and predicted; the cache has what its steps took."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from job import Job

pytestmark = pytest.mark.ranks

PROGRAM = "tests/e2e/programs/measured_steps.py"
Events = dict[tuple[str, int, str], list[dict[str, Any]]]
SAME_US = 1e-3
"""Times were in nanoseconds."""


def timeline(file: Path) -> Events:
    """(timeline, slot, category) -> events; those of one thread do not overlap."""
    told = json.loads(file.read_text())["traceEvents"]
    titles = {each["pid"]: each["args"]["name"].split()[0] for each in told if each["name"] == "process_name"}
    threads = {(each["pid"], each["tid"]): each["args"]["name"] for each in told if each["name"] == "thread_name"}
    found, of_thread = defaultdict(list), defaultdict(list)
    for each in told:
        if each["ph"] == "X":
            assert each["ts"] >= 0
            assert each["dur"] >= 0
            place = each["pid"], each["tid"]
            found[titles[each["pid"]], int(threads[place].split()[1]), each["cat"]].append(each)
            of_thread[place].append(each)
    for events in of_thread.values():
        events.sort(key=lambda each: each["ts"])
        for one, other in itertools.pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] + SAME_US
    return found


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": "4", "RANNC_SCHEDULE": "zb_h1"}, []),
        pytest.param({"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "2"}, ["nodes"], marks=pytest.mark.long),
    ],
    ids=["two stages", "two replicas on two nodes"],
)
def test_a_training_that_is_measured(job: Job, tmp_path: Path, plan: dict[str, str], words: list[str]) -> None:
    file = tmp_path / "step.json"
    output = job.train(2, PROGRAM, *words, RANNC_EVENT_TRACE_FILE=str(file), RANNC_CACHE="on", **plan)
    assert f"The timeline of a step was written to {file}" in output
    events = json.loads(file.read_text())["traceEvents"]
    processes = {each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert processes == {
        f"{title} node {node}" for title in ("measured", "predicted") for node in range(1 + len(words))
    }
    found = timeline(file)
    programs = {int(slot): names.split() for slot, names in re.findall(r"slot (\d) computes (.*) \.", output)}
    assert sorted(programs) == [0, 1]
    pipeline = plan["RANNC_PARTITION_NUM"] == "2"
    for slot, names in programs.items():
        assert len(names) == (3 * 8 if pipeline else 2 * 2)
        for title in ("measured", "predicted"):
            events = sorted(found[title, slot, "compute"], key=lambda each: each["ts"])
            assert [each["name"] for each in events] == names, "in the order of the Program"
            messages = found[title, slot, "receive"]
            assert bool(messages) == pipeline
            reductions = [each["name"] for each in found[title, slot, "reduce"]]
            assert reductions == ([] if pipeline else ["R"])
        assert found["measured", slot, "wait"][0]["name"] == "agreement"
    received = {
        title: sorted(each["name"] for slot in (0, 1) for each in found[title, slot, "receive"])
        for title in ("measured", "predicted")
    }
    assert received["measured"] == received["predicted"]

    listed = json.loads(job.run("rannc-cache", "ls", "--json"))
    assert "measured" in [each["kind"] for each in listed], output
    latest = next(each for each in listed if each["kind"] == "measured")
    shown = job.run("rannc-cache", "show", json.loads(latest["components"]["deployment"]))
    stages = re.findall(r"^(\d) +forward +[\d.]+ ms +[\d.]+ ms +[+-][\d.]+ %$", shown, re.MULTILINE)
    assert stages == (["0", "1"] if pipeline else ["0"])
    for what in ("step", "backward", "not computing"):
        assert re.search(rf" {what} +[\d.]+ ms +[\d.]+ ms +[+-][\d.]+ %$", shown, re.MULTILINE), shown
    assert ("of it weight grad" in shown) == pipeline
    assert bool(re.search(r" all-reduce +[\d.]+ ms +[\d.]+ ms ", shown)) != pipeline

    entry = json.loads(job.run("rannc-cache", "show", json.loads(latest["components"]["deployment"]), "--json"))
    for slot, names in programs.items():
        own = [each for each in entry["measured"]["events"] if each[:2] == [slot, "compute"]]
        assert [each[4] for each in sorted(own, key=lambda each: each[2])] == names, "the events of a step are stored"
    texts = entry["deployment"]["table"]["texts"]
    assert any(text.startswith("programs/measured_steps.py:") for text in texts), "lines of the script"
