"""bench/peers.py: of tiny models it prints what docs/benchmarks.md has of larger ones, and no side trains wrongly."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from job import ROOT, Job

sys.path.insert(0, str(ROOT / "bench"))
import peers
from _peer_runs import JOBS, PLAIN, lines_changed

NUMBER = r"([\d.]+)"
SPREAD = rf"{NUMBER} \({NUMBER} to {NUMBER}\)"
STEPS = re.compile(rf"^(\S.*?) +{SPREAD} +{SPREAD} +(\d+e[+-]\d+)(?:  +(\S.*))?$", re.M)
JOB = re.compile(rf"^(\S.*?) +{SPREAD} s +{SPREAD} s +{SPREAD} ms +{SPREAD} MiB +(\d+)(?:  +(\S.*))?$", re.M)
PEERS = {name: told for name, told in peers.SIDES.items() if name not in ("rannd", *peers.ZERO)}
"""Those of the environment, which DeepSpeed is not in."""


def steps(job: Job, workload: str, *sides: str) -> str:
    """Output of the comparison of a workload."""
    small = ("--small", "--rounds", "2", "--steps", "1")
    return job.run(sys.executable, "bench/peers.py", "steps", *small, "--workloads", workload, "--sides", *sides)


def rows(output: str, pattern: re.Pattern[str]) -> dict[str, tuple[str, ...]]:
    return {found[0]: found[1:] for found in pattern.findall(output)}


def check_steps(output: str, sides: set[str]) -> None:
    """All sides trained, with the losses of plain PyTorch, and the ratios are those of their throughputs."""
    found = rows(output, STEPS)
    assert set(found) == {"rannd", *sides}, output
    for side, cells in found.items():
        *numbers, away, error = cells
        rate, ratio = (numbers[:3], numbers[3:])
        assert float(away) <= 1e-5, side
        assert not error, side
        for middle, low, high in (map(float, rate), map(float, ratio)):
            assert 0 < low <= middle <= high, side
    assert found["rannd"][3:6] == ("1.000",) * 3
    assert re.search(r"^rannd's plan: \d stages?: ", output, re.M), output


@pytest.mark.long
@pytest.mark.ranks
def test_rannd_is_compared_with_a_peer(job: Job) -> None:
    output = steps(job, "tutorial", "ddp")
    check_steps(output, {"DistributedDataParallel"})
    median = float(rows(output, STEPS)["DistributedDataParallel"][3])
    goal = re.search(
        rf"the best peer, .* \(tutorial {NUMBER}\): {NUMBER}, at least 1.000: (reached|MISSED)$", output, re.M
    )
    assert goal is not None, output
    assert float(goal[1]) == float(goal[2]) == median
    assert (goal[3] == "reached") == (median >= 1)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("workload", ["digits", "gpt2", "resnet", "head", "unet"])
def test_every_peer_of_the_environment_trains(job: Job, workload: str) -> None:
    check_steps(steps(job, workload, *PEERS), set(PEERS.values()))


FAILING = """
import json, sys
from pathlib import Path
words = sys.argv[1:]
sides = words[words.index("--sides") + 1 : words.index("--folder")]
folder = Path(words[words.index("--folder") + 1])
if "ddp" in sides:
    (folder / "side-0").write_text("ddp")
    (folder / "side-1").write_text("ddp")
    (folder / "error-1").write_text("RuntimeError: what it is")
    (folder / "error-0").write_text("RuntimeError: the other rank is gone")
    sys.exit(1)
(folder / "results").write_text(json.dumps({
    "rates": {"rannd": [3.0, 2.0], "fsdp2": [1.0, 4.0]}, "plan": "1 stage",
    "losses": {"rannd": [2.0, 1.0], "fsdp2": [2.0, 1.1]},
    "reference": {"whole": [2.0, 1.0], "microbatches": [7.0, 7.0]},
}))
"""
"""A job, of which one side fails."""


def test_a_side_that_fails_or_trains_wrongly_has_its_error_in_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.py").write_text(FAILING)
    monkeypatch.setattr(peers, "RANNC_RUN", [sys.executable, str(tmp_path / "job.py")])
    options = Namespace(workloads=["gpt2"], sides=["ddp", "fsdp2"], rounds=2, steps=1, small=True)
    assert peers.compare_steps(options), "rannd's losses are right"
    output = capsys.readouterr().out
    assert re.search(r"^DistributedDataParallel +RuntimeError: what it is$", output, re.M), output
    assert rows(output, STEPS)["FSDP2"][3:] == ("1.750", "0.500", "3.000", "1e-01", "wrong losses")
    assert "best peer" not in output, "a side with wrong losses is no peer"


@pytest.mark.full
@pytest.mark.ranks
def test_whole_jobs_end_with_the_same_loss(job: Job) -> None:
    names = [name for name in JOBS if name != "deepspeed"]
    small = ("--small", "--repeats", "1", "--steps", "20", "--jobs", *names)
    output = job.run(sys.executable, "bench/peers.py", "jobs", *small)
    found = rows(output, JOB)
    told = {JOBS[name].told for name in names if name != "rannd"} | {
        PLAIN.told,
        "rannc-run, cold",
        "rannc-run, repeated",
    }
    assert set(found) == told, output
    for name, (*numbers, lines, error) in found.items():
        assert not error, name
        assert all(float(number) > 0 for number in numbers), name
        assert (int(lines) == 0) == (name == PLAIN.told), name
    wrap = re.search(
        rf"wrap to the end of the first step \(a step of it takes \S+ s\): {NUMBER} s, at most 1.00 s", output
    )
    share = re.search(rf"^goal: the same / that of the first run: {NUMBER}, at most 0.100", output, re.M)
    assert wrap is not None, output
    assert share is not None, output
    assert float(wrap[1]) < float(found["rannc-run, repeated"][0])
    assert 0 < float(share[1]) < 1, "a repeated job measures and plans again"
    profiling = re.search(rf"^goal: profiling in training steps: {NUMBER}, at most 15.0", output, re.M)
    assert profiling is not None, output
    assert float(profiling[1]) > 0


def test_lines_that_differ_are_counted(tmp_path: Path) -> None:
    plain, other = tmp_path / "plain.py", tmp_path / "other.py"
    plain.write_text('"""One."""\nimport a\n\nx = a.f(1,\n        2)\ny = 2\n')
    other.write_text('"""Other."""\nimport a\nimport b  # more\n\n# A comment.\nx = a.f(1, 2)\ny = 3\n')
    assert lines_changed(plain, plain) == 0
    assert lines_changed(other, plain) == 2
    assert lines_changed(plain, other) == 2
