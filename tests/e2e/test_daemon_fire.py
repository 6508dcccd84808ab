"""A training job whose daemon is frozen, killed or filled with garbage goes on, uncached at worst."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from job import DEBUG, FORK, ROOT, Job

from rannd.daemon.client import request_channel
from rannd.daemon.common import protocol
from rannd.daemon.common.paths import DaemonPaths, places
from rannd.daemon.store.entry_rows import FORMAT
from rannd.daemon.store.store import Store

pytestmark = pytest.mark.ranks

SCRIPT = ROOT / "tests" / "e2e" / "programs" / "two_models.py"
QUICK = {"RANNC_DAEMON_TIMEOUT_S": "2"}
STEPS = 12
"""Lines of losses: two models, two ranks, three steps."""


@pytest.fixture(scope="module")
def uncached(job: Job) -> list[str]:
    """The losses of a run that never asks a daemon."""
    found = losses(fire(job, "nowhere", lambda: None, RANNC_CACHE="off"))
    assert len(found) == STEPS
    return found


@pytest.fixture
def fresh(job: Job) -> DaemonPaths:
    """The places of the job's daemon, which runs and has nothing."""
    job.run("rannd", "start")
    job.run("rannc-cache", "clear")
    return where(job)


def where(job: Job) -> DaemonPaths:
    return places(job.environment)


def daemon(job: Job) -> int:
    return int(Path(where(job).life).read_text())


def losses(output: str) -> list[str]:
    return sorted(re.findall(r"(?:first|second) rank=\d step=\d loss=\S+", output))


def warnings(output: str) -> list[str]:
    """Warnings of ranks that say there is no cache."""
    return [line for line in output.splitlines() if "without a cache" in line and line.startswith("[")]


def fire(job: Job, moment: str, deed: Callable[[], None], **variables: str) -> str:
    """Output of a job of two ranks that ends well, with a deed once it has printed `moment`."""
    folder = job.home.folder()
    started = subprocess.Popen(
        ["rannc-run", "-np", "2", FORK, str(SCRIPT), str(folder)],
        env={**job.environment, **QUICK, **DEBUG, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines, done = [], False
    try:
        assert started.stdout is not None
        for line in started.stdout:
            lines.append(line)
            if moment in line and not done:
                done = True
                deed()
            for name in re.findall(r"reached (\w+)", line):
                (folder / name).touch()
        code = started.wait(60)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        assert started.stdout is not None
        started.stdout.close()
    output = "".join(lines)
    assert code == 0, output
    assert done or moment == "nowhere", f"it never printed {moment!r}:\n{output}"
    assert output.count("Finished on rank") == 2, output
    return output


MOMENTS = ["reached first", "Running profiler", "reached second"]


@pytest.mark.long
@pytest.mark.parametrize("moment", [pytest.param(MOMENTS[0], marks=pytest.mark.full), *MOMENTS[1:]])
def test_a_frozen_daemon_costs_one_warning(job: Job, uncached: list[str], fresh: DaemonPaths, moment: str) -> None:
    pid = daemon(job)
    try:
        output = fire(job, moment, lambda: os.kill(pid, signal.SIGSTOP))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert losses(output) == uncached
    (told,) = warnings(output)
    assert "did not answer in time" in told


@pytest.mark.long
def test_a_daemon_frozen_before_the_start_costs_one_warning(job: Job, uncached: list[str], fresh: DaemonPaths) -> None:
    pid = daemon(job)
    os.kill(pid, signal.SIGSTOP)
    try:
        output = fire(job, "nowhere", lambda: None)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert losses(output) == uncached
    assert len(warnings(output)) == 1
    assert "rannc-run: no daemon" not in output, "rannc-run sees that it listens, and leaves the word to rank 0"


@pytest.mark.parametrize(
    "moment",
    [pytest.param(each, marks=pytest.mark.full if "reached" in each else pytest.mark.long) for each in MOMENTS],
)
def test_a_killed_daemon_is_replaced_without_a_word(
    job: Job, uncached: list[str], fresh: DaemonPaths, moment: str
) -> None:
    pid = daemon(job)
    output = fire(job, moment, lambda: os.kill(pid, signal.SIGKILL))
    assert losses(output) == uncached
    assert warnings(output) == []
    assert daemon(job) != pid
    again = fire(job, "nowhere", lambda: None)
    assert again.count("Plan from the cache (") == 2, "what was made is kept by the next one"


def garbage(here: DaemonPaths) -> None:
    """Messages of every wrong kind, and a store file of nothing but noise."""
    chance = random.Random(7)
    with zmq.Context() as context:
        for _ in range(100):
            with context.socket(zmq.DEALER) as peer:
                peer.linger = 1000
                peer.connect(f"ipc://{here.socket}")
                frames = [chance.randbytes(chance.randrange(300)) for _ in range(chance.randrange(1, 4))]
                peer.send_multipart([b"", *([protocol.HEADER] * chance.randrange(2)), *frames])
    store = Path(here.store)
    with store.open("r+b") as file:
        file.write(chance.randbytes(store.stat().st_size))


@pytest.mark.parametrize(
    "moment",
    [pytest.param(each, marks=pytest.mark.full if "profiler" in each else pytest.mark.long) for each in MOMENTS[1:]],
)
def test_a_daemon_full_of_garbage_is_no_hindrance(
    job: Job, uncached: list[str], fresh: DaemonPaths, moment: str
) -> None:
    pid = daemon(job)
    output = fire(job, moment, lambda: garbage(fresh))
    assert losses(output) == uncached
    assert daemon(job) == pid, "it lives on"
    assert len(warnings(output)) == 0


@pytest.mark.long
def test_garbage_under_the_very_keys_is_set_aside_and_healed(job: Job, uncached: list[str], fresh: DaemonPaths) -> None:
    """A writer with a fault of its own, whose checksums hold: values of every kind that say nothing."""
    fire(job, "nowhere", lambda: None)
    chance = random.Random(5)

    def ask(request: protocol.Request) -> protocol.Reply:
        return request_channel.ask(fresh.socket, request, time.monotonic() + 60)

    listed = ask(protocol.List())
    assert isinstance(listed, protocol.Entries)
    kinds = {entry.kind for entry in listed.entries}
    assert {"trace", "profile", "links", "deployment"} <= kinds
    entries = [
        protocol.NewEntry(entry.key, entry.kind, entry.components, chance.randbytes(entry.length))
        for entry in listed.entries
    ]
    assert ask(protocol.Put("0", entries)) == protocol.Done(len(entries))
    output = fire(job, "nowhere", lambda: None)
    assert losses(output) == uncached
    assert warnings(output) == []
    for kind in ("trace", "profile", "links", "deployment"):
        assert f"The cached {kind} cannot be used" in output
    assert "cannot be used" not in fire(job, "nowhere", lambda: None), "healed"


def test_a_store_of_a_newer_rannd_is_left_alone(job: Job, uncached: list[str]) -> None:
    here = where(job)
    fire(job, "nowhere", lambda: None)  # makes the store
    job.run("rannd", "stop")
    Path(here.store).unlink(missing_ok=True)
    store = Store(here.store, max_bytes=1 << 30)
    store._db.sql.execute("PRAGMA journal_mode = DELETE")
    store._db.sql.execute(f"PRAGMA user_version = {FORMAT + 1}")
    store.close()
    before = Path(here.store).read_bytes()
    output = fire(job, "nowhere", lambda: None)
    assert losses(output) == uncached
    assert len(warnings(output)) == 1
    assert f"is of format {FORMAT + 1}, which a newer rannd wrote" in output
    assert "update it" in output
    assert Path(here.store).read_bytes() == before
    assert sorted(path.name for path in Path(here.cache).iterdir()) == [Path(here.store).name]
    Path(here.store).unlink()
