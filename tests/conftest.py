"""What the tests of several packages need: a home of their own for daemon and configuration, and a fork server."""

from __future__ import annotations

import gc
import os
import random
import select
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fork_server
import pytest
from hypothesis import settings

from rannd.daemon.client.cache import Lease

# The same examples in each run, so that a change is what makes a test fail; TEST_SEED=random looks for new ones.
if os.environ.setdefault("TEST_SEED", "0") == "random":
    os.environ["TEST_SEED"] = str(random.SystemRandom().randrange(1, 10**6))  # before workers start: one for all
FIXED = os.environ["TEST_SEED"] == "0"
settings.register_profile("noisy", deadline=None, derandomize=FIXED)  # no deadline: the machine may be busy
settings.load_profile("noisy")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs a CUDA device where there is none."""
    if item.get_closest_marker("gpu") is not None:
        from rannd.device.identity import has_accelerator

        if not has_accelerator():
            pytest.skip("needs a CUDA device")


SLOWEST = 12
"""Folders and files whose time a run of the tests shows."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Ends the output with the seconds of each folder and of the slowest files: the table of docs/testing.md."""
    folders: defaultdict[str, float] = defaultdict(float)
    files: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                files[file] += report.duration
                folders["/".join(file.split("/")[:2])] += report.duration
    if len(folders) > 1:
        terminalreporter.section("seconds of one worker, by folder and by file")
        for table in (folders, files):
            for name, seconds in sorted(table.items(), key=lambda item: -item[1])[:SLOWEST]:
                terminalreporter.write_line(f"{seconds:8.0f}  {name}")


class DaemonHome:
    """Runtime, cache and configuration directories of one test, and the end of the daemons started in them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.runtime = base / "run"
        self.cache = base / "cache"
        self.conf = base / "conf"
        for directory in (self.runtime, self.cache, self.conf):
            directory.mkdir(mode=0o700)

    def environment(self) -> dict[str, str]:
        """This process's environment, pointing here."""
        return {**os.environ, **self.variables()}

    def variables(self) -> dict[str, str]:
        """The variables that point here."""
        return {
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_CACHE_HOME": str(self.cache),
            "RANNC_CONF_DIR": str(self.conf),
        }

    def pids(self) -> list[int]:
        """Daemons that live here now, or have their cache here: some have sockets elsewhere, where these are unsafe."""
        found = []
        for life in (*self.runtime.glob("rannd/*.life"), *Path(f"/tmp/rannd-{os.getuid()}").glob("*.life")):
            text = life.read_text().strip()
            if text and _is_daemon_of(int(text), life) and (life.is_relative_to(self.runtime) or self._has(int(text))):
                found.append(int(text))
        return found

    def _has(self, pid: int) -> bool:
        """Whether a process has its cache here."""
        with suppress(OSError):
            return f"XDG_CACHE_HOME={self.cache}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False

    def end_daemons(self) -> None:
        """Kill every daemon that still lives here, and wait for its end."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                watch = os.pidfd_open(pid)
                os.kill(pid, signal.SIGKILL)
                select.select([watch], [], [])
                os.close(watch)


def _is_daemon_of(pid: int, life: Path) -> bool:
    """Whether process `pid` has the lock file open: a number alone may be somebody else's by now."""
    descriptors = Path(f"/proc/{pid}/fd")
    with suppress(OSError):
        return any(os.path.realpath(fd) == str(life) for fd in descriptors.iterdir())
    return False


@pytest.fixture
def daemon_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonHome]:
    """A home of the test's own, short enough for AF_UNIX; the environment of the test points to it."""
    base = Path(tempfile.mkdtemp(prefix="rannd-test-"))
    home = DaemonHome(base)
    for name, value in home.variables().items():
        monkeypatch.setenv(name, value)
    for name in [name for name in os.environ if name.startswith("RANNC_") and name != "RANNC_CONF_DIR"]:
        monkeypatch.delenv(name)
    leases: list[Lease] = []
    make = Lease.__init__

    def noted(lease: Lease, *arguments: Any) -> None:
        make(lease, *arguments)
        leases.append(lease)

    monkeypatch.setattr(Lease, "__init__", noted)
    try:
        yield home
    finally:
        for lease in leases:  # one that is still held would warn, in another test, that its home is gone
            lease._end.set()
            lease._thread.join()
        home.end_daemons()
        shutil.rmtree(base)


@pytest.fixture(scope="module", autouse=True)
def _old_objects_are_not_looked_at_again() -> None:
    """Keeps the garbage collector to what a file's tests make: torch and all tests together are a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forks() -> Iterator[Path]:
    """The socket of a fork server."""
    folder = Path(tempfile.mkdtemp(prefix="rf-", dir="/tmp"))  # short enough for AF_UNIX
    with fork_server.running(folder / "socket"):
        yield folder / "socket"
    shutil.rmtree(folder)
