"""bench/elastic.py: what it simulates is what happens."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kept_results import KEPT, tables

from rannd.runner.elastic.patience import FEW

BENCH = Path(__file__).resolve().parents[3] / "bench" / "elastic.py"
DAY = 86_400.0


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(BENCH.parent))  # for modules that its scripts share
    spec = importlib.util.spec_from_file_location("elastic_bench", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["elastic_bench"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCH.parent))


@pytest.fixture
def costs(bench: Any) -> Any:
    return bench.Costs(step_s=1.0, save_s=4.0, stop_s=2.0, start_s=10.0, plan_s=20.0, silent_s=15.0, every=100)


def _all(bench: Any, hosts: int) -> list[Any]:
    return [bench.Event(0.0, "join", host) for host in range(hosts)]


def test_a_job_whose_hosts_stay_loses_its_start_alone(bench: Any, costs: Any) -> None:
    events = _all(bench, 4)
    job = bench.played(events, costs, bench.POLICIES[0], 4, 1030.0)
    assert job.done == pytest.approx(1000.0), "20 s to plan, 10 to start"
    assert bench.oracle(events, costs, 4, 1030.0) == pytest.approx(1030.0)


def test_a_host_that_comes_costs_saving_and_a_start(bench: Any, costs: Any) -> None:
    events = [*_all(bench, 1), bench.Event(530.0, "join", 1)]
    job = bench.played(events, costs, bench.POLICIES[0], 2, 1000.0)
    first, away = 500.75 / 2, 4 + 2 + 10  # half of the hosts; a change has to settle, and is looked for
    assert job.done == pytest.approx(first + (1000.0 - 530.75 - away))
    assert job.starts == 2


@pytest.mark.parametrize(("policy", "kept"), [(0, 350.0), (2, 300.0)])
def test_a_host_that_fails_costs_a_step_or_those_since_the_checkpoint(
    bench: Any, costs: Any, policy: int, kept: float
) -> None:
    events = [*_all(bench, 2), bench.Event(380.75, "fail", 1)]
    planned_s = 10.0 * policy  # only rannd plans in advance
    job = bench.played(events, costs, bench.POLICIES[policy], 2, 380.75 + 15 + 2 + 10 + planned_s + 100)
    assert job.done == pytest.approx(kept + 50.0)


def test_hosts_that_were_given_notice_are_left_together_before_the_first_goes(bench: Any, costs: Any) -> None:
    events = [*_all(bench, 4), bench.Event(380.0, "notice", 1), bench.Event(450.0, "notice", 2)]
    job = bench.played(events, costs, bench.POLICIES[0], 4, 480.0 + 16 + 200)
    assert job.done == pytest.approx(450.0 + 100.0)
    assert job.starts == 2


def test_hosts_that_come_wait_for_each_other_where_changes_are_many(bench: Any, costs: Any) -> None:
    events = [*_all(bench, 2), *(bench.Event(100.0 * host, "join", host) for host in range(2, 12))]
    patient = bench.played(events, costs, bench.POLICIES[0], 12, 2000.0)
    assert FEW <= patient.starts < 1 + 10
    assert len(patient.used) == 12


def test_without_saving_all_since_the_checkpoint_is_lost(bench: Any, costs: Any) -> None:
    events = [*_all(bench, 1), bench.Event(530.0, "join", 1)]
    job = bench.played(events, costs, bench.POLICIES[3], 2, 602.25)
    assert job.done == pytest.approx(200.0 + 602.25 - 572.25)


@pytest.mark.parametrize("seed", range(5))
def test_no_policy_is_better_than_the_oracle_nor_ours_worse_than_the_others(bench: Any, costs: Any, seed: int) -> None:
    for hosts in (4, 32):
        events = bench.drawn(hosts, 24.0, seed)
        assert [event.at_s for event in events] == sorted(event.at_s for event in events)
        best = bench.oracle(events, costs, hosts, DAY)
        jobs = [bench.played(events, costs, policy, hosts, DAY) for policy in bench.POLICIES]
        ours, *others = (job.done for job in jobs)
        assert best > ours >= max(others)
        for job in jobs:
            assert job.done + sum(job.lost.values()) / costs.step_s / hosts == pytest.approx(best), "each loss is told"


def test_goals(bench: Any) -> None:
    """0.95 of the oracle's at 64 devices; less at 1,024, where there is a change every 80 s."""
    costs = bench.Costs(step_s=2.0, save_s=5.0, stop_s=2.0, start_s=10.0, plan_s=20.0, silent_s=15.0, every=100)
    for hosts, share in ((8, 0.98), (128, 0.89)):
        events = bench.drawn(hosts, 24.0, 0)
        best = bench.oracle(events, costs, hosts, DAY)
        assert bench.played(events, costs, bench.POLICIES[0], hosts, DAY).done >= share * best


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    trace = tmp_path / "spot.txt"
    trace.write_text("# of two hosts\n0 join 0\n0 join 1\n100 notice 1\n4000 join 1\n")
    command = [sys.executable, str(BENCH), "--hosts", "--hours", "2", "--trace", str(trace)]  # as `make bench`: all
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "rannd" in output
    assert any(line.startswith("spot.txt") for line in output.splitlines())
    trace.write_text("100 vanish 1\n")
    wrong = subprocess.run(command, check=False, capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "is not 'seconds join|notice|fail host'" in wrong.stderr


@pytest.mark.full
@pytest.mark.ranks
def test_changes_of_a_real_job_are_measured(tmp_path: Path) -> None:
    small = ("--layers", "2", "--width", "64", "--words", "64", "--length", "8", "--steps", "2")
    kept = tmp_path / "kept"
    command = [sys.executable, str(BENCH), "changes", *small]
    subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, KEPT: str(kept)})
    ((first, fewer, more, killed),) = tables(kept).values()
    assert first["plan found in"] == "made anew"
    assert [row["start"] for row in (fewer, more, killed)] == ["then 3 ranks", "then 4 ranks", "kill -9 of a rank"]
    for row in (fewer, more, killed):
        assert row["plan found in"] > 0, "its plan was there"
        assert row["to the end of the first new step"] > 0
    assert fewer["steps lost"] == more["steps lost"] == 0, "no step is lost when the hosts change"
    assert killed["steps lost"] >= 1, "the one in progress"
