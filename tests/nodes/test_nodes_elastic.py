"""Elastic jobs over several nodes: nodes that are added, removed, cut off or not ready."""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from elastic_outcome import STEPS, Outcome
from network import Network, Node

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "e2e" / "programs" / "elastic.py"
STRAGGLING = PROGRAM.with_name("straggling.py")
LONG = 120.0


class Training(Outcome):
    """A job that runs from one node, with a host file in the folder that all share."""

    def __init__(self, node: Node, hosts: str) -> None:
        super().__init__(node.network.work)
        self.node = node
        self.name(hosts)

    def name(self, hosts: str) -> None:
        """Write the host file."""
        (self.folder / "hosts").write_text(hosts.replace(" ", "\n"))

    def start(self, pause_s: float, *flags: str, **variables: str):
        """The job."""
        program = (str(PROGRAM), str(self.folder), str(self.epochs), self.kind, str(pause_s))
        return self.node.start("rannc-run", "--elastic", "--hostfile", "hosts", *flags, *program, **variables)

    def await_step(self, job, step: int) -> None:
        """Wait until a step was made."""
        deadline = time.monotonic() + LONG
        while not (self.folder / "losses").exists() or max(self.losses()) < step:
            assert job.poll() is None, job.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.long
def test_nodes_are_added_and_removed(network: Callable[..., Network]) -> None:
    a, _, c = network(3).made
    training = Training(a, "a:1 b:1")
    job = training.start(0.3)
    training.await_step(job, 3)
    training.name("a:1 b:1 c:2")
    training.await_step(job, 14)
    training.name("a:1 c:2")
    output, _ = job.communicate(timeout=4 * LONG)
    assert job.returncode == 0, output
    training.check()
    assert all(len(made) == 1 for made in training.losses().values()), "no step was lost"
    assert set(training.ranks_of()) == {2, 3, 4}, output
    assert c.empty_within(LONG)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=pytest.mark.full), "adam"])
def test_a_node_that_is_cut_off_is_left_out(network: Callable[..., Network], kind: str) -> None:
    """Its part of the last step is in the memory of another node."""
    a, b, c = network(3).made
    training = Training(a, "a:1 b:2 c:1")
    training.kind = kind
    job = training.start(0.5, RANNC_SNAPSHOTS="neighbour", RANNC_PARTITION_NUM="2")
    training.await_step(job, 7)
    c.cut_off()
    output, _ = job.communicate(timeout=4 * LONG)
    assert job.returncode == 0, output
    assert "host c is lost" in output
    assert "which the ranks have kept in memory" in output
    training.check()
    assert training.ranks_of()[-1] == 3
    again = [step for step, made in training.losses().items() if len(made) > 1]
    assert len(again) <= 1
    assert a.empty_within(LONG)
    assert b.empty_within(LONG)


@pytest.mark.long
def test_a_node_is_lost_with_the_one_that_has_its_copies(network: Callable[..., Network]) -> None:
    a, b, c = network(3).made
    training = Training(a, "a:1 b:1 c:1")
    job = training.start(0.5, RANNC_SNAPSHOTS="neighbour")
    training.await_step(job, 7)
    c.cut_off()
    b.cut_off()
    output, _ = job.communicate(timeout=4 * LONG)
    assert job.returncode == 0, output
    assert "which the ranks have kept in memory" not in output
    assert "Going on after step 5" in output
    training.check()
    assert training.ranks_of()[-1] == 1
    again = [step for step, made in training.losses().items() if len(made) > 1]
    assert len(again) <= 5, "checkpoints are five steps apart"
    assert a.empty_within(LONG)


@pytest.mark.long
def test_a_node_that_is_preempted_is_left_in_time(network: Callable[..., Network]) -> None:
    """The notice is given on that node, by examples/spot, for a service that is here a program on the node."""
    a, _, c = network(3).made
    training = Training(a, "a:1 b:1 c:1")
    job = training.start(1.0)
    training.await_step(job, 3)
    service = c.start(sys.executable, str(ROOT / "tests/metadata_service.py"), "22")
    try:
        code, told = c.run(
            *(sys.executable, str(ROOT / "examples/spot/watch_preemption.py"), "aws"),
            *("--address", "http://127.0.0.1:8000", "--every", "0.2"),
            seconds=LONG,
        )
    finally:
        service.kill()
        service.communicate()
    assert code == 0, told
    assert re.search(r"the ranks save and end (in \d s|now), and go on without c, as 2 ranks on a:1, b:1", told)
    assert c.empty_within(LONG)
    training.await_step(job, max(training.losses()) + 1)
    code, told = a.run("rannc-run", "notify-preempt", "--in", "5")
    assert (code, "rannc-run itself runs there: the ranks save and end now" in told) == (0, True), told
    output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 128 + signal.SIGTERM, output
    assert "asking the ranks to save and end, for 2 ranks on a:1, b:1" in output
    training.name("a:1 b:1")
    output, _ = training.start(0.0).communicate(timeout=4 * LONG)
    training.check()
    assert all(len(made) == 1 for made in training.losses().values()), "no step was lost"
    ranks = training.ranks_of()
    assert ranks == [3] * ranks.count(3) + [2] * ranks.count(2)
    assert min(ranks.count(3), ranks.count(2)) > 0


@pytest.mark.long
def test_a_node_that_is_not_ready_is_left_out(network: Callable[..., Network]) -> None:
    a, _ = network(2).made
    training = Training(a, "a:1 b:1 nowhere:1")
    job = training.start(0.0)
    output, _ = job.communicate(timeout=4 * LONG)
    assert job.returncode == 0, output
    assert "1 of 3 hosts is not ready" in output
    assert "leaving out nowhere" in output
    training.check()
    assert training.ranks_of() == [2] * STEPS


@pytest.mark.long
@pytest.mark.parametrize("drop", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_slow_node_is_reported_and_left_out_of_the_next_start_or_gets_less(
    network: Callable[..., Network], drop: bool
) -> None:
    a, _, _ = network(3).made
    folder = a.network.work
    (folder / "hosts").write_text("a\nb\nc\n")
    flags = ("--elastic", "--hostfile", "hosts", "--log-dir", "logs", *(["--drop-stragglers"] if drop else []))
    job = a.start("rannc-run", *flags, str(STRAGGLING), str(folder), "c", RANNC_PARTITION_NUM="1")
    deadline = time.monotonic() + LONG
    while not (folder / "logs" / "slow_hosts").exists():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    host, factor = (folder / "logs" / "slow_hosts").read_text().split()
    (folder / "hosts").write_text("a slots=2\nb\nc\n")
    output, _ = job.communicate(timeout=LONG)
    assert job.returncode == 0, output
    assert host == "c", output
    assert float(factor) > 1.5, output
    assert re.search("host c computes [0-9.]+ times as long as planned, the others [0-9.]+ times", output), output
    starts = {file.name: file.read_text() for file in folder.glob("start_*")}
    if drop:
        assert "it is left out of the next start (--drop-stragglers)" in output
        assert starts == {"start_3_0": "a", "start_3_1": "a", "start_3_2": "b"}, output
        return
    assert "its ranks get fewer rows from the next start on, if that helps" in output
    assert starts["start_4_3"] == "c", output
    rows = [int((folder / f"rows_4_{rank}").read_text()) for rank in range(4)]
    assert sum(rows) == 12
    assert rows[3] < 3 <= min(rows[:3]), output


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=pytest.mark.full), "adam"])
def test_results_stay_if_a_slow_node_gets_fewer_rows(network: Callable[..., Network], kind: str) -> None:
    a, _ = network(2).made
    training = Training(a, "a:1 b:1")
    training.kind = kind
    told = "from rannd.ranks.rank_notes import tell; tell(slow=1, slow_percent=300, least_rows=1, most_rows=200)"
    (training.folder / "at_4").write_text(f"if rank == 0 and ranks == 2: {told}")
    (training.folder / "at_9").write_text("print(f'rank {rank} has {len(rows)} rows', flush=True)")
    job = training.start(0.3, RANNC_PARTITION_NUM="1")
    training.await_step(job, 5)
    training.name("a:2 b:1")
    output, _ = job.communicate(timeout=4 * LONG)
    assert job.returncode == 0, output
    training.check()
    assert {2, 3} == set(training.ranks_of())
    assert [f"rank {rank} has {rows} rows" in output for rank, rows in ((0, 5), (1, 5), (2, 2))] == [True] * 3
