"""Jobs whose hosts change, whose ranks die, and that are asked to leave: results are those of one process."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_outcome import STEPS, Outcome
from job import Job

pytestmark = pytest.mark.ranks
PROGRAM = "tests/e2e/programs/elastic.py"
LONG_S = 300


class Training(Outcome):
    """One elastic job in a folder of its own."""

    def __init__(self, job: Job, folder: Path, kind: str = "sgd") -> None:
        super().__init__(folder, kind)
        self.job = job
        self.hosts = folder / "hosts"
        self.started: list[subprocess.Popen[str]] = []

    def at(self, step: int, code: str) -> None:
        """Let the ranks of the first start that gets there run `code` before a step."""
        mark = self.folder / f"done_{step}"
        lines = [
            "import os, pathlib, time",
            f"mark = pathlib.Path({str(mark)!r} + str(rank))",
            "if not mark.exists():",
            "    mark.touch()",
            *(f"    {line}" for line in code.splitlines()),
        ]
        (self.folder / f"at_{step}").write_text("\n".join(lines))

    def host_file_at(self, step: int, *texts: str) -> None:
        """Let rank 0 write the host file before a step, several times in a row."""
        lines = [f"if rank == 0: pathlib.Path({str(self.hosts)!r}).write_text({text!r})" for text in texts]
        self.at(step, "\n".join(lines))

    def start(self, *flags: str, pause_s: float = 0.2, **variables: str) -> subprocess.Popen[str]:
        program = (PROGRAM, str(self.folder), str(self.epochs), self.kind, str(pause_s))
        process = self.job.start("rannc-run", "--elastic", *flags, *program, **variables)
        self.started.append(process)
        return process

    def run(self, *flags: str, code: int = 0, pause_s: float = 0.2, seconds: float = LONG_S, **variables: str) -> str:
        process = self.start(*flags, pause_s=pause_s, **variables)
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == code, output
        return output


@pytest.fixture
def training(job: Job, tmp_path: Path) -> Iterator[Training]:
    made = Training(job, tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            process.wait(LONG_S)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param("sgd", marks=pytest.mark.full), "adam"])
def test_ranks_come_and_go_with_the_lines_of_the_host_file(training: Training, kind: str) -> None:
    training.kind = kind
    training.hosts.write_text("localhost slots=2")
    training.host_file_at(4, "localhost slots=4")
    training.host_file_at(14, "localhost slots=3 # one is needed elsewhere")
    output = training.run("--hostfile", str(training.hosts))
    training.check()
    ranks = training.ranks_of()
    assert ranks == sorted(ranks[:4]) + ranks[4:]
    assert {2, 4, 3} == set(ranks)
    assert output.count("asking") == 2
    assert all(len(made) == 1 for made in training.losses().values()), "no step was lost"


@pytest.mark.long
def test_a_rank_that_dies_costs_the_steps_since_the_last_checkpoint(training: Training) -> None:
    training.at(13, "if rank == 1: os.kill(os.getpid(), 9)")
    output = training.run("-np", "2", RANNC_SNAPSHOTS="off")
    training.check()
    assert "killed by SIGKILL" in output
    assert "starting again (failure 1 of at most 100)" in output
    assert [step for step, made in training.losses().items() if len(made) > 1] == [11, 12, 13]


@pytest.mark.long
@pytest.mark.parametrize("who", ["rank == 1", pytest.param("True", marks=pytest.mark.full)])
def test_what_ranks_keep_in_memory_outlives_them(training: Training, who: str) -> None:
    """One is killed, or all: at most one step is lost, also before there is any checkpoint.

    A rank may be killed before another one has written its part of the step.
    """
    training.kind = "adam"
    training.at(3, f"if {who}: os.kill(os.getpid(), 9)")
    training.at(13, f"if {who}: os.kill(os.getpid(), 9)")
    training.at(6, "if rank == 0: print(os.environ['RANND_RESCUED_FOLDER'], flush=True)")
    output = training.run("-np", "3", RANNC_PARTITION_NUM="3", RANNC_SNAPSHOTS="neighbour")
    training.check()
    told = rf"{re.escape(str(training.folder / 'checkpoints'))}/step-0000000[23]\.rescued-\w+$"
    assert re.search(told, output, re.MULTILINE), "the listing of the directory may not show it yet"
    assert re.findall(r"saving step (\d+), which the ranks have kept in memory", output)[0] in ("2", "3")
    assert "Going on after step 12" in output or "Going on after step 13" in output
    assert {step for step, made in training.losses().items() if len(made) > 1} <= {3, 13}
    assert not list((training.folder / "checkpoints").glob("*rescued*"))


@pytest.mark.long
def test_a_rank_that_dies_while_it_saves(training: Training) -> None:
    code = """
from rannd.runtime.checkpoint import saving
def die(*_):
    os.kill(os.getpid(), 9)
if rank == 1: saving.write_shard = die
"""
    training.at(9, code.strip())
    training.run("-np", "2", RANNC_PARTITION_NUM="2")
    training.check()


@pytest.mark.long
def test_a_full_disk_costs_a_checkpoint_and_not_the_training(training: Training) -> None:
    code = """
from rannd.runtime.checkpoint import saving
right = saving.write_shard
def full(*_):
    saving.write_shard = right
    raise OSError(28, "No space left on device")
if rank == 0: saving.write_shard = full
"""
    training.at(8, code.strip())
    output = training.run("-np", "2")
    training.check()
    assert "No space left on device" in output
    assert "The training goes on; the next try is in 5 steps" in output
    assert (training.folder / "checkpoints" / "step-00000020").exists()


@pytest.mark.long
def test_two_changes_within_a_second_are_one(training: Training) -> None:
    training.hosts.write_text("localhost slots=2")
    training.host_file_at(5, "localhost slots=4", "localhost slots=3")
    output = training.run("--hostfile", str(training.hosts))
    training.check()
    assert output.count("asking") == 1
    assert training.ranks_of()[-1] == 3


@pytest.mark.long
def test_the_launchers_own_machine_stays(training: Training) -> None:
    training.hosts.write_text("localhost slots=2")
    training.host_file_at(3, "elsewhere slots=2")
    output = training.run("--hostfile", str(training.hosts))
    training.check()
    assert "rannc-run itself runs here: the job goes on with the hosts that it had" in output
    assert set(training.ranks_of()) == {2}


@pytest.mark.long
def test_the_plan_for_other_hosts_is_there_when_they_come(training: Training) -> None:
    """Plans for one slot fewer and one more are made while the job trains, also where its own plan was made so."""

    def plans() -> int:
        return training.job.run("rannc-cache", "ls").count("deployment")

    before = plans()
    training.hosts.write_text("localhost slots=2")
    training.at(22, f"while not pathlib.Path({str(training.folder / 'enough')!r}).exists(): time.sleep(0.05)")
    # Other jobs of this home have other plans.
    process = training.start("--hostfile", str(training.hosts), pause_s=0.6, RANNC_MAX_PIPELINE="16")

    def wait_for(count: int) -> None:
        deadline = time.monotonic() + LONG_S
        while plans() < before + count:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)

    wait_for(3)  # for 2, 1 and 3 ranks
    training.hosts.write_text("localhost slots=3")
    wait_for(4)  # for 4 ranks, by those 3
    (training.folder / "enough").touch()
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, output
    training.check()
    assert "Plan from the cache" in output.partition("asking")[2]


@pytest.mark.long
def test_a_host_file_that_is_half_written_changes_nothing(training: Training) -> None:
    training.hosts.write_text("localhost slots=2")
    training.host_file_at(3, "localhost slots=")
    output = training.run("--hostfile", str(training.hosts))
    training.check()
    assert "is not a host" in output
    assert "the job goes on with the hosts that it had" in output


@pytest.mark.long
def test_sigterm_saves_and_the_next_run_goes_on(training: Training) -> None:
    process = training.start("-np", "2", pause_s=0.5)
    deadline = time.monotonic() + LONG_S
    while not (training.folder / "losses").exists() or len(training.losses()) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "SIGTERM: 2 ranks may save and end by themselves" in output
    before = training.losses()
    training.run("-np", "2", pause_s=0.0)
    training.check()
    assert all(len(made) == 1 for made in training.losses().values()), before


@pytest.mark.long
def test_what_fails_before_its_first_step_is_not_started_for_ever(training: Training) -> None:
    (training.folder / "at_0").write_text("raise KeyError('no such column')")
    output = training.run("-np", "2", code=1)
    assert output.count("starting again") == 2
    assert "the job is not started again: 3 starts in a row have failed without a new step" in output
    assert "KeyError: 'no such column'" in output


@pytest.mark.long
def test_a_step_that_always_fails_is_not_started_for_ever(training: Training) -> None:
    (training.folder / "at_7").write_text("if rank == 1: raise RuntimeError('bad sample')")
    output = training.run("-np", "2", code=1, pause_s=0.0)
    assert "the job is not started again" in output
    assert max(training.losses()) == 7


@pytest.mark.long
def test_it_waits_for_enough_hosts(training: Training) -> None:
    training.hosts.write_text("localhost slots=1")
    process = training.start("--min-np", "2", "--hostfile", str(training.hosts), pause_s=0.0)
    assert process.stdout is not None
    line = next(line for line in process.stdout if "waiting" in line)
    assert "has 1 slot; waiting for at least 2 (--min-np)" in line
    training.hosts.write_text("localhost slots=2")
    output, _ = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, output
    training.check()
    assert set(training.ranks_of()) == {2}


@pytest.mark.full
@pytest.mark.timeout(7 * LONG_S)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_twenty_random_changes(training: Training, kind: str) -> None:
    """Slots come and go, one rank is killed, or all of them, at 20 of 24 steps; at most one step is lost each time."""
    chance = random.Random(kind)
    training.kind, slots = kind, 3
    training.hosts.write_text(f"localhost slots={slots}")
    killed = 0
    for step in sorted(chance.sample(range(1, STEPS - 1), 20)):
        event = chance.choice(["slots", "slots", "one", "all"])
        if event == "slots":
            slots = chance.choice([each for each in (1, 2, 3, 4) if each != slots])
            # All wait until they are asked to leave, so that each change is one of its own.
            training.at(
                step,
                f"""
from rannd.runtime.elastic import elastic_state
import time
if rank == 0: pathlib.Path({str(training.hosts)!r}).write_text('localhost slots={slots}')
while not elastic_state._present._leave.asked: time.sleep(0.05)
""".strip(),
            )
        else:
            killed += 1
            who = f"rank == {chance.randrange(slots)}" if event == "one" else "True"
            training.at(step, f"if {who}: os.kill(os.getpid(), 9)")
    flags = ("--hostfile", str(training.hosts))
    output = training.run(*flags, pause_s=0.0, seconds=6 * LONG_S, RANNC_SNAPSHOTS="neighbour")
    training.check()
    assert output.count("starting again") == killed
    assert output.count(": asking") == 20 - killed
    assert sum(len(made) - 1 for made in training.losses().values()) <= killed


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes file systems")
def test_a_file_system_that_is_full(training: Training) -> None:
    """Neither checkpoints nor steps in memory can be written there for a while, in which a rank is killed."""
    directory = training.folder / "checkpoints"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(directory)], check=True)
    filler = directory / "filler"
    try:
        fill = f"""
if rank == 0:
    with open({str(filler)!r}, "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass
"""
        training.at(7, fill.strip())
        training.at(13, "if rank == 1: os.kill(os.getpid(), 9)")
        training.at(14, f"if rank == 0: pathlib.Path({str(filler)!r}).unlink()")
        output = training.run("-np", "2", RANNC_SNAPSHOTS="neighbour")
        training.check()
        assert "The training goes on; the next try is in 5 steps" in output
        assert re.search(
            r"step 1[23] cannot be saved to .*: No space left on device; the last checkpoint: step 5", output
        )
        assert [step for step, made in training.losses().items() if len(made) > 1] == list(range(6, 14))
    finally:
        subprocess.run(["umount", str(directory)], check=True)
