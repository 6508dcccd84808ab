"""One daemon, however many start it at once; and it is nobody's child."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from rannd.daemon.client import spawn
from rannd.daemon.client.cache import connect
from rannd.daemon.common.listening import answers
from rannd.daemon.common.paths import MAX_SOCKET_PATH, places
from rannd.daemon.server import boot
from rannd.daemon.server.server import Settings
from rannd.errors import DaemonError

STARTS = """
import sys
from rannd.daemon.client import spawn
sys.stdin.readline()
print(spawn.ensure(idle_s=600, max_bytes=1 << 30, timeout_s=120).pid)
"""


def ensure() -> spawn.Daemon:
    return spawn.ensure(idle_s=600, max_bytes=1 << 30, timeout_s=60)


def run_old(version: str) -> None:
    """Start a daemon that says it is of `version`."""
    where = places()
    where.secure_runtime()
    spawn.start_if_down(where, Settings(600, 1 << 30, version), time.monotonic() + 60)


def await_end(pid: int) -> None:
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    assert select.select([watch], [], [], 60)[0], f"process {pid} does not end"
    os.close(watch)


def test_32_starts_at_once_are_one_daemon(daemon_home) -> None:
    starters = [
        subprocess.Popen([sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(32)
    ]
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write("\n")
        starter.stdin.flush()
    pids = {starter.communicate()[0] for starter in starters}
    assert all(starter.returncode == 0 for starter in starters)
    assert pids == {f"{daemon_home.pids()[0]}\n"}
    assert len(daemon_home.pids()) == 1


def test_starting_a_running_daemon_succeeds(daemon_home) -> None:
    first, second = ensure(), ensure()
    assert (first.started, second.started) == (True, False)
    assert first.pid == second.pid


def test_it_is_detached(daemon_home, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RANK",
        "OMPI_COMM_WORLD_RANK",
        "PMIX_RANK",
        "PMI_SIZE",
        "MASTER_ADDR",
        "CUDA_VISIBLE_DEVICES",
        "LD_PRELOAD",
    ):
        monkeypatch.setenv(name, "")
    leaked = os.open(daemon_home.base / "leak", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(leaked, True)
    pid = ensure().pid
    os.close(leaked)
    process = Path(f"/proc/{pid}")
    fields = process.joinpath("stat").read_text().rpartition(")")[2].split()
    parent, group, session, terminal = (int(fields[index]) for index in (1, 2, 3, 4))
    assert os.getpid() not in (parent, group, session)
    assert session not in (os.getsid(0), pid), "its own session, but not its leader: it never gets a terminal"
    assert terminal == 0
    assert os.readlink(process / "cwd") == "/"
    names = {line.partition("=")[0] for line in process.joinpath("environ").read_text().split("\0") if line}
    assert all(name in spawn.KEPT or name.startswith("LC_") for name in names)
    opened = [os.readlink(fd) for fd in process.joinpath("fd").iterdir()]
    files = [path for path in opened if path.startswith("/") and path != "/dev/null"]
    mine = (str(daemon_home.runtime), str(daemon_home.cache))
    assert all(path.startswith(mine) for path in files), files
    assert not [path for path in opened if path.startswith("pipe:")]


def test_it_may_have_a_descriptor_for_each_of_many_clients(daemon_home) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        pid = ensure().pid
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    wanted = boot.DESCRIPTORS if limits[1] == resource.RLIM_INFINITY else min(boot.DESCRIPTORS, limits[1])
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] == wanted


def test_neither_torch_nor_numpy_is_loaded(daemon_home) -> None:
    mapped = re.findall(r"(?:site|dist)-packages/([^/\n]+)", Path(f"/proc/{ensure().pid}/maps").read_text())
    assert mapped, "libraries of zmq and others"
    assert not {each for each in mapped if each.startswith(("torch", "numpy"))}
    script = "import sys, rannd.daemon.server.boot; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_it_outlives_the_process_group_that_started_it(daemon_home) -> None:
    script = STARTS + "import time; sys.stdout.flush(); time.sleep(1000)"
    starter = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    starter.stdin.write("\n")
    starter.stdin.flush()
    pid = int(starter.stdout.readline())
    os.killpg(starter.pid, signal.SIGKILL)
    starter.communicate()
    assert ensure() == spawn.Daemon(pid, ensure().version, False)


def test_a_dead_daemons_leavings_are_no_hindrance(daemon_home) -> None:
    first = ensure()
    os.kill(first.pid, signal.SIGKILL)
    await_end(first.pid)
    assert Path(places().socket).exists(), "kill -9 leaves the socket"
    second = ensure()
    assert second.started
    assert second.pid != first.pid


def test_stop_ends_it_and_leaves_no_socket(daemon_home) -> None:
    pid = ensure().pid
    watch = os.pidfd_open(pid)
    assert spawn.stop(places(), "test", time.monotonic() + 60)
    assert select.select([watch], [], [], 60)[0]
    os.close(watch)
    assert not Path(places().socket).exists()
    assert not spawn.stop(places(), "test", time.monotonic() + 60)


def test_sigterm_ends_it_in_order(daemon_home) -> None:
    pid = ensure().pid
    os.kill(pid, signal.SIGTERM)
    await_end(pid)
    assert not Path(places().socket).exists()
    assert "ends: SIGTERM" in Path(places().log).read_text()


def test_an_older_daemon_is_replaced_and_says_why(daemon_home) -> None:
    run_old("0.0.1")
    (old,) = daemon_home.pids()
    new = ensure()
    assert new.started
    assert new.pid != old
    await_end(old)
    assert "replaces 0.0.1" in Path(places().log).read_text()


def test_a_newer_daemon_is_used(daemon_home) -> None:
    run_old("999.0")
    (pid,) = daemon_home.pids()
    assert ensure() == spawn.Daemon(pid, "999.0", False)


def test_a_failed_start_says_why(daemon_home) -> None:
    daemon_home.cache.rmdir()
    daemon_home.cache.write_text("in the way")
    with pytest.raises(DaemonError, match=r"cannot be started: the cache directory .* cannot be created"):
        ensure()
    daemon_home.cache.unlink()
    assert ensure().started


def test_a_crash_at_start_shows_the_log(daemon_home, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = daemon_home.base / "site" / "msgspec"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('half an installation')")
    monkeypatch.setattr(spawn, "_roots", lambda: [str(broken.parent)])
    with pytest.raises(DaemonError, match="half an installation"):
        ensure()


def test_a_store_held_by_another_container_names_the_cure(daemon_home, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure()
    other = daemon_home.base / "other"
    other.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))  # the same home directory, another runtime directory
    with pytest.raises(DaemonError, match=r"held by another process.*XDG_CACHE_HOME"):
        ensure()


def test_a_long_runtime_directory_works(daemon_home, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon_home.runtime = daemon_home.base / ("x" * 150)
    daemon_home.runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(daemon_home.runtime))
    where = places()
    assert len(where.socket) <= MAX_SOCKET_PATH
    assert ensure().started
    assert len(daemon_home.pids()) == 1
    spawn.stop(where, "test", time.monotonic() + 60)
    assert not Path(where.socket).exists()


def test_a_linked_runtime_directory_is_refused(daemon_home) -> None:
    elsewhere = daemon_home.base / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (daemon_home.runtime / "rannd").symlink_to(elsewhere)
    with pytest.raises(DaemonError, match="symbolic link"):
        ensure()
    assert list(elsewhere.iterdir()) == []


ACTIVATED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
from rannd.daemon.server import boot
from rannd.daemon.common.paths import places
from rannd.daemon.server.server import Settings
boot.run(places(), Settings(float(sys.argv[2]), 1 << 30, "0.1.0", pinned=True))
"""


def test_socket_activation(daemon_home) -> None:
    """The listener stays systemd's: a request may come before the daemon, and the socket outlives it."""
    where = places()
    where.secure_runtime()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where.socket)
        listener.listen(16)
        script = (
            "from rannd.daemon.client import spawn; "
            "print(spawn.ensure(idle_s=600, max_bytes=1 << 30, timeout_s=120).pid)"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as asker:
            program = [sys.executable, "-c", ACTIVATED, str(listener.fileno()), "0.05"]
            select.select([listener], [], [], 120)  # it has asked; nobody starts the daemon again once it was idle
            with subprocess.Popen(program, pass_fds=[listener.fileno()]) as daemon:
                assert asker.communicate()[0] == f"{daemon.pid}\n"
                assert daemon.wait() == 0
        assert Path(where.socket).exists()
        assert answers(where.socket)


def test_an_activated_socket_elsewhere_is_refused(daemon_home) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(daemon_home.base / "wrong.sock"))
        listener.listen()
        done = subprocess.run(
            [sys.executable, "-c", ACTIVATED, str(listener.fileno()), "1"],
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode != 0
    assert "correct ListenStream=" in done.stderr


def test_orders_are_readable_json(daemon_home) -> None:
    orders = boot.Orders([], 7, places(), Settings(1.0, 2, "3"))
    assert json.loads(msgspec.json.encode(orders))["places"]["cache"].startswith(str(daemon_home.cache))


@pytest.mark.skipif(shutil.which("mpirun", path=Path(sys.executable).parent) is None, reason="no mpirun")
@pytest.mark.ranks
def test_it_outlives_mpirun(daemon_home) -> None:
    """The daemon that a rank started goes on when its job has ended, normally or by a kill of the ranks."""
    script = daemon_home.base / "rank.py"
    script.write_text(
        "import os, signal\nfrom rannd.daemon.client import spawn\n"
        "spawn.ensure(idle_s=600, max_bytes=1 << 30, timeout_s=120)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    mpirun = str(Path(sys.executable).parent / "mpirun")
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [mpirun, "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable, str(script)],
        env={**daemon_home.environment(), **allow},
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert done.returncode != 0
    client = connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)
    assert client.connected
    (pid,) = daemon_home.pids()
    assert ensure() == spawn.Daemon(pid, ensure().version, False)
