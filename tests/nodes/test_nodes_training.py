"""Training over several nodes, each with its own daemon: equal to one process, and planned once."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import fork_server
import pytest
from network import Network, Node
from other_launchers import other_shell

pytestmark = pytest.mark.ranks

PROGRAM = Path(__file__).parents[1] / "e2e" / "programs" / "whole_batch.py"
FORKED = (fork_server.__file__, str(PROGRAM))
STAGES = {"RANNC_PARTITION_NUM": "2"}


def digests(output: str) -> dict[str, set[str]]:
    """What rank 0 prints after each step."""
    found: dict[str, set[str]] = {}
    for step, total in re.findall(r"after step (\d): ([\d.]+)", output):
        found.setdefault(step, set()).add(total)
    return found


def trained(node: Node, hosts: str) -> str:
    code, output = node.run("rannc-run", "--hosts", hosts, *FORKED, **STAGES, RANNC_LOG_LEVEL="debug")
    assert output.count("after step 3: done") == 3, output
    assert code == 0, output
    return output


def daemons(node: Node) -> list[int]:
    return [each.pid for each in node.processes() if "rannd/daemon/server/boot.py" in " ".join(each.cmdline())]


def test_nodes_train_as_one_process_and_plan_once(network: Callable[..., Network]) -> None:
    """Each node's own name leads to its loopback, as Debian installs it."""
    a, b, c = network(3, own_on_loopback=True).made
    code, alone = a.run(sys.executable, str(PROGRAM), "alone")
    assert code == 0, alone
    expected = digests(alone)
    assert len(expected) == 4

    first = trained(a, "a:2,b:2")
    assert digests(first) == expected
    assert set(re.findall(r"^\[(\w:\d)\] after step 0", first, re.M)) == {"a:0", "a:1", "b:2", "b:3"}
    assert " Plan: " in first
    assert [len(daemons(node)) for node in (a, b, c)] == [1, 1, 0]
    listed = [node.run("rannc-cache", "ls")[1] for node in (a, b)]
    kinds = [sorted(re.findall(r"^(\w+)\t(\w+)", text, re.M)) for text in listed]
    assert kinds[0] == kinds[1], "what one node keeps, the other does"
    assert {"trace", "deployment", "profile", "links"} <= {kind for kind, _ in kinds[0]}

    second = trained(a, "b:2,a:2")
    assert digests(second) == expected
    assert "[b:0]" in second
    assert "Using trace" in second
    assert " Plan from the cache (" in second
    for planning in (" Plan: ", "Tracing model", "Running profiler", "No cached deployment", "No cached trace"):
        assert planning not in second

    # A node that never took part asks those that did.
    third = trained(b, "c:2,b:2")
    assert digests(third) == expected
    assert "b has trace" in third
    assert "b has deployment" in third
    assert " Plan: " not in third


@pytest.mark.long
@pytest.mark.parametrize("own_on_loopback", [False, True])
def test_a_script_for_torchrun(network: Callable[..., Network], own_on_loopback: bool) -> None:
    a, _ = network(2, own_on_loopback=own_on_loopback).made
    script = str(PROGRAM.with_name("own_group.py"))
    code, output = a.run("rannc-run", "--hosts", "a:2,b:1", script, "before", **STAGES)  # no forks: pyrannc is imported
    assert code == 0, output
    seen = sorted(re.findall(r"^\[(.*)\] trained \[(.*)\]", output, re.M))
    assert seen == [("a:0", "0, 3, 0, 2"), ("a:1", "1, 3, 1, 2"), ("b:2", "2, 3, 0, 1")], output


@pytest.mark.long
@pytest.mark.parametrize("name", ["mpich", pytest.param("impi-rt", marks=pytest.mark.full)])
def test_other_launchers_reach_other_nodes(network: Callable[..., Network], name: str, tmp_path: Path) -> None:
    """This machine may be called localhost; the ranks of the others do not look for rank 0 on theirs."""
    (shell,) = other_shell(name, tmp_path)
    made = network(2)
    agents = {
        "HYDRA_LAUNCHER_EXEC": str(made.agent),
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": str(made.agent),
    }
    options = ("--hosts", "localhost:2,b:2", *FORKED)
    code, output = made.made[0].run(*shell.command, *options, **STAGES, **agents)
    assert code == 0, output
    assert len(digests(output)) == 4
    assert set(re.findall(r"^\[(\w:\d)\] after step 0", output, re.M)) == {"a:0", "a:1", "b:2", "b:3"}


@pytest.mark.long
def test_nodes_take_a_better_plan_together(network: Callable[..., Network]) -> None:
    """The other node's daemon has the old plan still."""
    a, _ = network(2).made
    program, learning = (
        str(PROGRAM.with_name("replanned.py")),
        {**STAGES, "RANNC_PIPELINE_NUM": "2", "RANNC_CALIBRATE_AFTER": "8"},
    )
    job = ("rannc-run", "--hosts", "a:1,b:1", FORKED[0], program, "plain")
    code, output = a.run(*job, "3", **learning)
    assert code == 0, output
    code, output = a.run(sys.executable, str(PROGRAM.with_name("uneven_plan.py")))
    assert code == 0, output
    code, output = a.run(*job, **learning, RANNC_REPLAN="now")
    assert code == 0, output
    assert output.count("Plan after measured steps: 2 stages") == 1
    assert re.search(r"STEPS \d+, 16 of them with another plan", output), output
