"""Hosts that are not ready: one table says what is wrong with each, and nothing starts."""

from __future__ import annotations

import importlib.metadata
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from network import Network, Node
from thinned import first

pytestmark = pytest.mark.ranks


def refused(node: Node, *options: str, **variables: str) -> list[list[str]]:
    """The rows of the table: host, what, found, what to do."""
    code, output = node.run("rannc-run", *options, **variables)
    assert code == 7, output
    assert "not ready, nothing was started (--no-preflight skips this check):" in output
    assert "the script runs" not in output
    head, *rows = [line for line in output.splitlines() if line.startswith("  ")]
    assert re.split(r"  +", head.strip()) == ["host", "what", "found", "what to do"]
    return [re.split(r"  +", row.strip(), maxsplit=3) for row in rows]


@pytest.fixture
def nodes(network: Callable[..., Network]) -> list[Node]:
    made = network(3)
    (made.work / "speak.py").write_text("print('the script runs')\n")
    return made.made


def test_hosts_that_are_ready(nodes: list[Node]) -> None:
    code, output = nodes[0].run("rannc-run", "--no-tune", "--hosts", "c:1,b:1", "speak.py")
    assert code == 0, output
    assert sorted(output.splitlines()) == ["[b:1] the script runs", "[c:0] the script runs"]


def test_all_that_is_wrong_is_in_one_table(nodes: list[Node]) -> None:
    a, b, c = nodes
    base = a.network.base
    (b.disk / ".pyrannc").mkdir()
    (b.disk / ".pyrannc" / "rannc_conf.toml").write_text("partition_num = 3\n")
    there = importlib.metadata.distribution("torch").locate_file(
        f"torch-{importlib.metadata.version('torch')}.dist-info"
    )
    other = base / "METADATA"
    other.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.7\n")
    b.hide(Path(str(there)) / "METADATA", other)
    (base / "empty").mkdir()
    b.hide(a.network.work, base / "empty")
    c.cut_off()

    rows = refused(a, "--hosts", "a:1,b:1,nowhere:1,c:1", "speak.py")
    found = {(host, what): (text, mend) for host, what, text, mend in rows}
    ours = importlib.metadata.version("torch")
    assert found[("b", "torch")] == ("2.12.7", f"{ours} on this host: install the same on all")
    assert found[("b", "configuration")] == ("partition_num = 3", "0 on this host: set the same on all")
    assert found[("b", "script")][0] == "no speak.py"
    assert found[("nowhere", "name")][0].startswith("not known here")
    assert "No route to host" in found[("c", "answer")][0]
    assert "ssh c true" in found[("c", "answer")][1]
    assert {host for host, _ in found} == {"b", "nowhere", "c"}, "a is ready"


@pytest.fixture
def slow(nodes: list[Node]) -> dict[str, str]:
    """Variables with which no host ever answers."""
    agent = nodes[0].network.base / "slow"
    agent.write_text("#!/bin/sh\nexec sleep 1000\n")
    agent.chmod(0o755)
    return {"PRTE_MCA_plm_ssh_agent": str(agent)}


def test_a_host_that_never_answers_is_given_up(nodes: list[Node], slow: dict[str, str]) -> None:
    a = nodes[0]
    rows = refused(a, "--hosts", "a:1,b:1", "--timeout-start", "3", "speak.py", **slow)
    assert [(row[0], row[1], row[2]) for row in rows] == [("b", "answer", "none within 3 s")]
    assert a.empty_within(30.0)


@pytest.mark.parametrize("options", [[], ["--no-preflight", "--grace-period", "1"]], ids=["asking", "starting"])
@pytest.mark.parametrize("signum", first(1, [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
def test_rannc_run_is_ended_while_a_host_does_not_answer(
    nodes: list[Node], slow: dict[str, str], signum: signal.Signals, options: list[str]
) -> None:
    a = nodes[0]
    job = a.start("rannc-run", "--no-tune", *options, "--hosts", "a:1,b:1", "speak.py", **slow)
    end = time.monotonic() + 60.0
    while not any(process.name() == "sleep" for process in a.ranks()):
        assert time.monotonic() < end
        time.sleep(0.05)
    job.send_signal(signum)
    output, _ = job.communicate(timeout=60)
    assert "the script runs" not in output
    if signum == signal.SIGINT:
        assert job.returncode == 130, output
    else:
        assert job.returncode in (-signum, 128 + signum), output
    assert a.empty_within(60.0), [process.cmdline() for process in a.ranks()]


def test_names_and_ports(nodes: list[Node]) -> None:
    a, b, c = nodes
    c.hosts.write_text(c.hosts.read_text().replace("10.213.47.2 b", "127.0.0.1 b"))
    rows = refused(a, "--hosts", "b:1,c:1", "speak.py")
    assert [(row[0], row[1], row[2]) for row in rows] == [("c", "name", "resolves b to itself (127.0.0.1)")]
    c.hosts.write_text(c.hosts.read_text().replace("127.0.0.1 b\n", ""))
    rows = refused(a, "--hosts", "b:1,c:1", "speak.py")
    assert [(row[0], row[1], row[2]) for row in rows] == [("c", "name", "does not know b, where rank 0 is")]

    server = b.start("python3", "-u", "-m", "http.server", "31234")
    assert server.stdout is not None
    assert "Serving" in server.stdout.readline()
    rows = refused(a, "--hosts", "b:1,a:1", "speak.py", MASTER_PORT="31234")
    assert [(row[0], row[1], row[2]) for row in rows] == [("b", "port", "MASTER_PORT=31234 is in use")]
    server.kill()
    server.communicate()


def test_who_starts_all_the_same_gets_what_mpi_says(nodes: list[Node]) -> None:
    a, _, c = nodes
    c.cut_off()
    code, output = a.run("rannc-run", "--no-preflight", "--hosts", "a:1,c:1", "speak.py")
    assert code == 7
    assert "2 of 2 ranks never started" in output
    assert "No route to host" in output
