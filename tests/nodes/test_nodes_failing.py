"""Nodes that fail, and jobs over several nodes that end badly: told soon, and nothing is left."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from network import Network, Node

pytestmark = pytest.mark.ranks

PROGRAMS = Path(__file__).parents[1] / "e2e" / "programs"
TRAIN = """
import pyrannc, time, torch
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
model = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(1_000_000):
    model(torch.randn(4, 8)).square().mean().backward()
    print("step", step, flush=True)
    time.sleep(0.05)
"""
SPEAK = """
import time
while True:
    print("step here", flush=True)
    time.sleep(0.05)
"""
LONG = 60.0


def started(node: Node, hosts: str, script: str, *options: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A job in the middle of its work, and the process of rannc-run."""
    (node.network.work / "train.py").write_text(script)
    job = node.start("rannc-run", "--hosts", hosts, *options, "train.py", RANNC_LOG_LEVEL="warn")
    said = []
    assert job.stdout is not None
    spoken: set[str] = set()
    for line in job.stdout:
        said.append(line)
        spoken |= set(re.findall(r"^\[(\w):\d+\] step", line))
        if len(spoken) == hosts.count(":"):
            return job, psutil.Process(job.pid)
    raise AssertionError("".join(said))


@pytest.mark.long
@pytest.mark.parametrize(
    "script", [TRAIN, pytest.param(SPEAK, marks=pytest.mark.full)], ids=["training", "without rannd"]
)
def test_a_node_that_is_cut_off(network: Callable[..., Network], script: str) -> None:
    a, b, c = network(3).made
    job, _ = started(a, "a:1,b:1,c:1", script)
    c.cut_off()
    moment = time.monotonic()
    output, _ = job.communicate(timeout=4 * LONG)
    took = time.monotonic() - moment
    assert took < 30.0, output
    assert job.returncode == 7, output
    assert "rannc-run: host c is lost: no answer for 15 s" in output
    table = [line for line in output.splitlines() if re.match(r"rannc-run:   [abc]  ", line)]
    assert re.match(r"rannc-run:   c +2 +\d+ .* host lost +no answer", table[-1]), output
    for node in (a, b):
        assert node.empty_within(LONG), [each.cmdline() for each in node.ranks()]
    # The ranks of the node itself end as well; only MPI's own daemon may wait there for its network.
    end = time.monotonic() + LONG
    while any("train.py" in each.cmdline() for each in c.ranks()):
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_rannc_run_is_ended(network: Callable[..., Network], signum: signal.Signals) -> None:
    a, b = network(2).made
    job, rannc_run = started(a, "a:1,b:2", SPEAK)
    rannc_run.send_signal(signum)
    output, _ = job.communicate(timeout=LONG)
    assert job.returncode == (-9 if signum == signal.SIGKILL else 128 + signum), output
    for node in (a, b):
        assert node.empty_within(LONG), [each.cmdline() for each in node.ranks()]


def test_mpirun_is_killed(network: Callable[..., Network]) -> None:
    a, b = network(2).made
    job, rannc_run = started(a, "a:1,b:1", SPEAK)
    mpirun = next(each for each in rannc_run.children(recursive=True) if each.name() == "prterun")
    mpirun.kill()
    output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 137, output
    assert "Open MPI failed: killed by SIGKILL" in output
    for node in (a, b):
        assert node.empty_within(LONG), [each.cmdline() for each in node.ranks()]


def test_a_rank_of_another_node_fails(network: Callable[..., Network]) -> None:
    a, b = network(2).made
    options = ("--log-dir", "logs", "--no-tune")
    code, output = a.run("rannc-run", "--hosts", "a:1,b:1", *options, str(PROGRAMS / "exit_on_rank.py"), "1", "7")
    assert code == 7, output
    assert re.search(r"^\[b:1\] the last words$", output, re.M)
    assert re.search(r"rannc-run:   b +1 +\d+ +\S+ +exit code 7 +the last words", output)
    (run,) = (a.network.work / "logs").iterdir()
    assert "the last words" in (run / "rank_1" / "stderr").read_text()
    for node in (a, b):
        assert node.empty_within(LONG)
