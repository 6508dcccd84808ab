"""Whatever is killed, in whatever way: nothing of a job lives on. Real processes, seen by their pids."""

from __future__ import annotations

import os
import re
import signal
import subprocess

import psutil
import pytest
from transcript import LONG, Shell, Witness, program, read_lines

pytestmark = pytest.mark.ranks


class Job:
    """Two ranks that hang, each with what was asked of hang.py, and every process of them."""

    def __init__(self, shell: Shell, *how: str, grace: str = "0.5") -> None:
        arguments = ["-np", "2", "--no-tune", "--grace-period", grace, program("hang.py"), *how]
        self.process: subprocess.Popen[str] = shell.start(*arguments)
        lines = read_lines(self.process.stdout, 4 if "child" in how else 2)
        self.pids = [int(match) for line in lines for match in re.findall(r"pid (\d+)", line)]
        self.watchers = [int(match) for line in lines for match in re.findall(r"watcher (\d+)", line)]
        if len(self.watchers) != 2:
            self.process.kill()
            raise AssertionError((lines, *self.process.communicate(timeout=LONG)))
        self.launcher = next(p.pid for p in psutil.Process(self.process.pid).children())
        stand_ins = [psutil.Process(pid).ppid() for pid in self.watchers]
        self.witnesses = [Witness(pid) for pid in [*self.pids, *self.watchers, *stand_ins, self.launcher]]

    def all_ended(self) -> bool:
        return all(witness.ended() for witness in self.witnesses)

    def finish(self) -> tuple[int, str]:
        """Exit code and standard error of rannc-run."""
        _, err = self.process.communicate(timeout=LONG)
        return self.process.returncode, err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_reaches_every_rank(shell: Shell, signum: signal.Signals, code: int) -> None:
    job = Job(shell, "child")
    job.process.send_signal(signum)
    assert job.all_ended()
    returned, err = job.finish()
    assert returned == code
    assert f"rannc-run: {signum.name}: ending 2 ranks" in err
    assert "failed" not in err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stubborn_ranks_are_killed_after_the_grace_period(shell: Shell, signum: signal.Signals) -> None:
    job = Job(shell, "stubborn", "child")
    job.process.send_signal(signum)
    assert job.all_ended()
    assert job.finish()[0] == 128 + signum


def test_a_second_ctrl_c_waits_for_nobody(shell: Shell) -> None:
    job = Job(shell, "stubborn", grace="10000")
    job.process.send_signal(signal.SIGINT)
    assert read_lines(job.process.stderr, 1)[0].startswith("rannc-run: SIGINT: ending 2 ranks")
    job.process.send_signal(signal.SIGINT)
    assert job.all_ended()
    code, err = job.finish()
    assert code == 130
    assert "SIGINT again" in err


@pytest.mark.parametrize("how", [["child"], ["stubborn", "child"]])
def test_rannc_run_is_killed(shell: Shell, how: list[str]) -> None:
    job = Job(shell, *how)
    job.process.kill()
    assert job.all_ended()
    job.finish()


@pytest.mark.parametrize("how", [["child"], ["stubborn", "child"]])
def test_the_launcher_is_killed(shell: Shell, how: list[str]) -> None:
    job = Job(shell, *how)
    os.kill(job.launcher, signal.SIGKILL)
    assert job.all_ended()
    code, err = job.finish()
    assert code == 128 + 9
    assert f"rannc-run: {shell.kind} failed: killed by SIGKILL" in err
    assert "ended with it: ranks 0, 1" in err


def test_rannc_run_and_the_launcher_are_killed(shell: Shell) -> None:
    job = Job(shell, "stubborn", "child")
    job.process.kill()
    os.kill(job.launcher, signal.SIGKILL)
    assert job.all_ended()
    job.finish()


def test_a_watcher_is_killed(shell: Shell) -> None:
    job = Job(shell, "stubborn", "child")
    os.kill(job.watchers[1], signal.SIGKILL)
    assert job.all_ended()
    code, err = job.finish()
    assert code == 128 + 9
    assert "the process that watches this rank was killed" in err


def test_a_rank_is_killed_and_its_child_stays(shell: Shell) -> None:
    job = Job(shell, "child")
    rank = psutil.Process(job.watchers[0]).children()[0].pid
    os.kill(rank, signal.SIGKILL)
    assert job.all_ended()
    code, err = job.finish()
    assert code == 128 + 9
    assert "left processes behind" in err


def test_a_child_that_stays_behind_a_rank_that_ended_well(shell: Shell) -> None:
    process = shell.start("-np", "2", program("leave_child.py"))
    witnesses = [Witness(int(line.split()[-1])) for line in read_lines(process.stdout, 2)]
    assert all(witness.ended() for witness in witnesses)
    _, err = process.communicate(timeout=LONG)
    assert process.returncode == 0
    assert err.count("left processes behind") == 2


def test_user_signals_are_forwarded_and_a_rank_may_end_well(shell: Shell) -> None:
    process = shell.start("-np", "2", program("on_signal.py"))

    def said() -> set[str]:
        """What both ranks say next, without their prefixes."""
        return {line.split()[-1] for line in read_lines(process.stdout, 2)}

    assert said() == {"ready"}
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        process.send_signal(signum)
        assert said() == {signum.name}
    process.send_signal(signal.SIGTERM)
    assert said() == {"SIGTERM"}
    assert process.wait(LONG) == 143
