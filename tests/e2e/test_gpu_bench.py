"""bench/gpu.py in its small form: each part runs on a CPU, and what is wrong or missing makes it fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import gpu as module

    yield module
    for name in set(sys.modules) - before:
        if name == "gpu" or name.startswith(("_gpu", "_starting")):
            del sys.modules[name]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("part", "only", "found"),
    [
        ("correct", "loss outside", "linear layers"),
        pytest.param("speed", "GPT-2", "GPT-2 2x32, rannd: step / eager's", marks=pytest.mark.long),
        pytest.param(
            "estimates", "linear 64 x 4, m 1", "linear 64 x 4, m 1: memory / estimate", marks=pytest.mark.long
        ),
        pytest.param(
            "shared",
            "a rank that raises in backward",
            "a rank that raises in backward: all ranks end",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_part_runs_on_a_cpu(part: str, only: str, found: str, tmp_path: Path) -> None:
    command = [sys.executable, "bench/gpu.py", part, "--device", "cpu", "--out", str(tmp_path), "--only", only]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads((tmp_path / "gpu.json").read_text())
    measured = told["parts"][part]
    assert measured["ended"] == "done"
    (result,) = [each for each in measured["results"] if each["name"] == found]
    assert result["ok"] is not False
    page = (tmp_path / "gpu.md").read_text()
    assert found in page
    assert f"## {part}: done" in page
    assert f"only those with '{only}'" in page


def test_a_part_that_takes_too_long_is_ended(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it has found until then stays."""
    monkeypatch.setattr(gpu, "BUDGET_S", {"estimates": 0.1})
    monkeypatch.setattr(gpu, "LAST_CHECK_S", 0.1)
    gpu.supervise("estimates", "cpu", tmp_path, "")
    told = gpu.record.read(tmp_path)
    assert told["parts"]["estimates"]["ended"] == "out of time"
    assert gpu.page.failed(told, ["estimates"])
    assert "NO-GO      part estimates ran to its end (out of time)" in (tmp_path / "gpu.md").read_text()


BROKEN = """
import os, time
from _gpu.record import Result

def checks(here):
    def good(): yield Result("good", True, 1)
    def hangs(): time.sleep(100)
    def dies(): os._exit(7)
    def poisons():
        type(here).compute = lambda self: 1 / 0
        raise ValueError("an illegal access")
    def last(): yield Result("last", True, type(here).__name__)
    return [("good", good), ("hangs", hangs), ("dies", dies), ("poisons", poisons), ("last", last)]
"""
START = """
import sys, types
sys.path.insert(0, {bench!r})
from _gpu import machine
find = machine.find
class Large(machine.Here):
    small = False
machine.find = lambda device: Large(find(device).device)
machine.facts = lambda here: {{"device": "one"}}
part = types.ModuleType("_gpu.correct")
exec({checks!r}, vars(part))
sys.modules["_gpu.correct"] = part
import gpu
gpu.CHECK_S["correct"] = 1.0
gpu.main()
"""


@pytest.mark.long
def test_checks_after_one_that_hangs_or_dies_are_carried_out(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The script starts itself for a part; here it is one with checks of its own."""
    script = tmp_path / "start.py"
    script.write_text(START.format(bench=str(ROOT / "bench"), checks=BROKEN))
    monkeypatch.setattr(gpu, "__file__", str(script))
    gpu.supervise("correct", "cpu", tmp_path, "")
    told = gpu.record.read(tmp_path)["parts"]["correct"]
    assert told["ended"] == "done"
    found = {each["name"]: each for each in told["results"]}
    assert {name: each["ok"] for name, each in found.items()} == {
        "good": True, "hangs": False, "dies": False, "poisons": False, "last": True,
    }  # fmt: skip
    assert found["hangs"]["found"] == "took too long"
    assert "in hangs" in found["hangs"]["note"]
    assert found["dies"]["found"] == "ended its process, exit code 7"
    assert "ValueError: an illegal access" in found["poisons"]["note"]
    assert gpu.page.failed(gpu.record.read(tmp_path), ["correct"])


def test_parts_leave_time_for_those_after_them(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(gpu.BUDGET_S.values()) <= gpu.TOTAL_S == 25 * 60
    most: dict[str, float] = {}
    monkeypatch.setattr(gpu, "supervise", lambda part, device, folder, only, most_s: most.update({part: most_s}))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", "nowhere"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert most["correct"] < gpu.BUDGET_S["correct"] + gpu.LAST_CHECK_S
    assert most["shared"] > most["correct"], "what was not used is there for later parts"


def _parts(gpu: ModuleType, folder: Path, **parts: list[Any]) -> Any:
    """What the file holds after parts with these checks; each is a result, or an error."""

    def check(outcome: Any) -> Iterator[Any]:
        if isinstance(outcome, Exception):
            raise outcome
        yield outcome

    for name, outcomes in parts.items():
        kept = gpu.record.Record(folder, name, {"device": "a GPU"})
        kept.run([(str(number), lambda each=each: check(each)) for number, each in enumerate(outcomes)], 60.0)
    return gpu.record.read(folder)


def test_goals_are_judged_by_results(gpu: ModuleType, tmp_path: Path) -> None:
    at_most, at_least = gpu.record.at_most, gpu.record.at_least
    speed = [
        at_most("small, rannd: step / eager's", 1.2, 1.05),
        at_least("medium, rannd: throughput / eager PyTorch's", 0.99, 0.98),
        at_most("medium, rannd: device reads in a step", 1.0, 1),
        at_most("medium, eager PyTorch: synchronisations in a step", 3.0, 1, judged=False),
    ]
    told = _parts(gpu, tmp_path, correct=[at_most("a", 1e-12, 1e-9)], speed=speed)
    verdicts = dict(gpu.page.verdicts(told))
    assert verdicts["all correct on one rank"] is True
    assert verdicts["a step takes at most 1.05 of eager PyTorch's"] is False
    assert verdicts["one rank has at least 0.98 of eager PyTorch's throughput"] is True
    assert verdicts["at most one device read or synchronisation in a steady step"] is True
    assert verdicts["estimates of time and memory within 15 %"] is None
    assert gpu.page.failed(told, ["speed"])
    assert not gpu.page.failed(told, ["correct"])
    assert gpu.page.failed(told, ["correct", "shared"]), "a part that never ran"


def test_an_error_in_a_check_is_a_wrong_result_and_others_go_on(
    gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = [ValueError("no"), gpu.record.at_most("b", float("nan"), 1.0), gpu.record.Result("c", True, 1)]
    told = _parts(gpu, tmp_path, correct=outcomes)
    assert [(each["name"], each["ok"]) for each in told["parts"]["correct"]["results"]] == [
        ("0", False),
        ("b", False),
        ("c", True),
    ]
    assert "ValueError: no" in told["parts"]["correct"]["results"][0]["found"]
    assert "ValueError: no" in capsys.readouterr().err


def test_results_of_another_device_are_not_kept(gpu: ModuleType, tmp_path: Path) -> None:
    _parts(gpu, tmp_path, correct=[gpu.record.Result("a", True, 1)])
    gpu.record.put(tmp_path, gpu.record.Part("shared"), {"device": "another GPU"})
    assert list(gpu.record.read(tmp_path)["parts"]) == ["shared"]


def test_no_check_begins_after_the_budget(gpu: ModuleType, tmp_path: Path) -> None:
    kept = gpu.record.Record(tmp_path, "correct", {})
    kept.run([("a", lambda: [gpu.record.Result("a", True, 1)])], -1.0)
    assert kept.part.ended == "out of time"
    assert kept.part.results == []
