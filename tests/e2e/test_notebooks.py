"""`notebook_launcher`: in a notebook that Jupyter runs, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from job import ROOT, Job

import pyrannc
from rannd.errors import UsageError

pytestmark = pytest.mark.ranks

SCRIPT = """
import os, signal, sys, threading, time
import torch
from torch import nn
import pyrannc

def train(way):
    inner = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    model(torch.randn(4, 8)).pow(2).mean().backward()
    if way == "fails" and pyrannc.get_rank() == 1:
        raise ValueError("no such file")
    if way == "hangs":
        time.sleep(600)
    if way == "plain" and pyrannc.get_rank() == 0:
        time.sleep(2)  # what the other rank says when it ends is heard
    print(f"rank {pyrannc.get_rank()} of {pyrannc.get_world_size()} is done", flush=True)

class Cell:  # the output of a notebook's cell, which passes on each write alone
    def write(self, text):
        os.write(1, f"<{text}>".encode())

    def flush(self):
        pass

def show():
    print("rank", pyrannc.get_rank(), "is", "done")
    for state in range(2):
        print(f"\\rbar {state}", end="")
    print("", "and ends", end="")

sys.last_value = ValueError("of an earlier cell")
way = sys.argv[1]
if way == "prints":
    sys.stdout = Cell()
    pyrannc.notebook_launcher(show, 2)
    sys.exit()
if way == "wrapped":
    train("plain")
if way == "hangs":
    threading.Timer(8, os.kill, (os.getpid(), signal.SIGINT)).start()
pyrannc.notebook_launcher(train, np=int(sys.argv[2]), args=(way,))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "notebook.py"
    file.write_text(SCRIPT)
    return str(file)


def test_a_function_runs_on_several_ranks(job: Job, script: str) -> None:
    output = job.run(sys.executable, script, "plain", "2", RANNC_PARTITION_NUM="2")
    assert "rank 0 of 2 is done" in output
    assert "rank 1 of 2 is done" in output
    assert "Plan: 2 stages" in output
    assert "earlier cell" not in output


@pytest.mark.parametrize(
    ("way", "np", "told"),
    [
        ("fails", "2", "ValueError: no such file"),
        pytest.param("hangs", "2", "KeyboardInterrupt", marks=pytest.mark.long),
        pytest.param(
            "wrapped", "2", "cannot start ranks after a model was wrapped in this process", marks=pytest.mark.long
        ),
    ],
)
def test_what_fails_ends_all_ranks_and_is_told(job: Job, script: str, way: str, np: str, told: str) -> None:
    output = job.run(sys.executable, script, way, np, code=-2 if way == "hangs" else 1)
    assert told in output


def test_lines_and_bars_of_ranks_arrive_whole(job: Job, script: str) -> None:
    output = job.run(sys.executable, script, "prints", "2")
    for rank in range(2):
        assert f"<rank {rank} is done\n>" in output
    for text in ("<\nbar 0>", "<\nbar 1>", "< and ends>"):  # \r is read as \n
        assert output.count(text) == 2


@pytest.mark.parametrize("np", ["two", 0, 2.5])
def test_what_is_no_number_of_ranks_is_told(np: Any) -> None:
    with pytest.raises(UsageError, match=rf"np={np!r}\): np is the number of ranks, 1 or more"):
        pyrannc.notebook_launcher(print, np=np)


def test_a_function_that_was_called_and_not_passed_is_told() -> None:
    with pytest.raises(UsageError, match=r"notebook_launcher\(None, ..\): .*pass the function, not its result"):
        pyrannc.notebook_launcher(None, np=2)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_rank_does_not_start_ranks(job: Job, script: str) -> None:
    output = job.run("rannc-run", "-np", "1", script, "plain", "2", code=1)
    assert "this process is one already" in output


@pytest.mark.long
def test_the_notebook_among_the_examples(job: Job, tmp_path: Path) -> None:
    run = f"""
import nbformat, nbclient
notebook = nbformat.read({str(ROOT / "examples/frameworks/notebook.ipynb")!r}, 4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
print([text for cell in notebook.cells for each in cell.get("outputs", ()) for text in [each.get("text", "")]])
"""
    output = job.run(sys.executable, "-c", run, JUPYTER_PATH=str(Path(sys.prefix, "share/jupyter")))
    assert "accuracy" in output
