"""A lease is held by who lives and runs; those who wait are told how far it is."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from other_rannd import RUN, copy_of, run

from rannd.daemon.client.cache import Client, Lease, connect
from rannd.daemon.common import keys
from rannd.daemon.server.leases import Leases, Waiter


def key(number: int) -> keys.Key:
    return keys.make_key("deployment", {"number": number})


def client() -> Client:
    return connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)


def test_a_silent_holder_loses_the_lease_one_that_promised_nothing_does_not() -> None:
    leases: Leases[str] = Leases()
    assert leases.grant("a", "beats", 1, now=0.0, patience=30.0) is None
    assert leases.grant("b", "never", 1, now=0.0) is None
    assert leases.deadline() == 30.0
    assert leases.silent(29.0) == []
    assert leases.beat("a", "beats", "profiling, 10 %", 20.0)
    assert not leases.beat("a", "another", "", 20.0)
    assert leases.deadline() == 50.0
    assert leases.silent(49.0) == []
    assert leases.silent(50.0) == [("a", "beats")]
    assert leases.silent(1e9) == [("a", "beats")], "b is watched by the kernel"


def test_who_comes_next_begins_with_a_beat_of_its_own() -> None:
    leases: Leases[str] = Leases()
    leases.grant("a", "first", 1, now=0.0, who="rank 0 of job 1", patience=30.0)
    leases.beat("a", "first", "planning", 1.0)
    leases.wait("a", Waiter("route", "second", 2, 1000.0, "rank 0 of job 2", 30.0))
    leases.release("a", "first")
    assert leases.next("a", 100.0) is not None
    ((_, held),) = leases.items()
    assert (held.who, held.progress, held.beaten) == ("rank 0 of job 2", "", 100.0)
    assert leases.silent(129.0) == []


def test_who_waits_is_told_how_far_it_is(daemon_home) -> None:
    with client() as cache:
        lease = cache.lease(key(1), 0, who="rank 0 of job 4711")
        assert isinstance(lease, Lease)
        told: list[str] = []
        seen = threading.Event()

        def tell(line: str) -> None:
            told.append(line)
            if "40 %" in line:
                seen.set()

        got: list[object] = []
        waiting = threading.Thread(target=lambda: got.append(client().lease(key(1), 120, tell)))
        waiting.start()
        lease.progress("profiling, 40 %")
        assert seen.wait(60)
        assert cache._session is not None
        (held,) = cache._session.state().leases
        assert (held.who, held.progress) == ("rank 0 of job 4711", "profiling, 40 %")
        cache.put(key(1), b"x")
        waiting.join()
        lease.release()
    assert got == [b"x"]
    assert told[-1].startswith("rank 0 of job 4711 is profiling, 40 %, for ")
    assert len(set(told)) == len(told), "no line twice"


HOLDER = """
import sys
from rannd.daemon.common import keys
from rannd.daemon.client.cache import Lease, connect
cache = connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)
found = cache.lease(keys.make_key("deployment", {"number": 1}), 60)
print(isinstance(found, Lease), flush=True)
sys.stdin.readline()
print(cache.put(keys.make_key("deployment", {"number": 1}), b"late"), flush=True)
"""


def test_a_frozen_holder_keeps_nobody_waiting_for_ever(daemon_home, tmp_path: Path) -> None:
    quick = copy_of(tmp_path, {"LEASE_S = 30.0": "LEASE_S = 2.0", "BEAT_S = 10.0": "BEAT_S = 0.5"})
    assert run(quick, RUN, "start").returncode == 0

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            env={**os.environ, **quick},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with start() as first, start() as second:
        try:
            assert first.stdout is not None
            assert second.stdout is not None
            running, other = (first, second) if _has(first, second) is first else (second, first)
            running.send_signal(signal.SIGSTOP)
            assert other.stdout is not None
            assert other.stdout.readline() == "True\n", "the lease is its own now"
            running.send_signal(signal.SIGCONT)
            for each in (other, running):
                assert each.communicate("\n")[0].endswith("True\n"), "what the first one made late is kept, too"
        finally:
            first.kill()
            second.kill()
    status = run(quick, RUN, "status", "--json").stdout
    assert "has been silent for 2 s" in status


def _has(*holders: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """The first of them that has the lease."""
    pipes = {each.stdout: each for each in holders}
    (ready, *_), _, _ = select.select(list(pipes), [], [], 60)
    assert ready.readline() == "True\n"
    return pipes[ready]


def _can_make_pid_namespaces() -> bool:
    return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _can_make_pid_namespaces(), reason="this user cannot make pid namespaces")
def test_a_holder_in_another_container_is_believed_as_long_as_it_beats(daemon_home, tmp_path: Path) -> None:
    """The daemon cannot see the process: in its own pid namespace it has another number, or none."""
    quick = copy_of(tmp_path, {"LEASE_S = 30.0": "LEASE_S = 2.0", "BEAT_S = 10.0": "BEAT_S = 0.5"})
    assert run(quick, RUN, "start").returncode == 0
    inside = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", HOLDER]
    with subprocess.Popen(
        inside, env={**os.environ, **quick}, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "True\n"
            waiting: list[object] = []
            told: list[str] = []
            other = threading.Thread(target=lambda: waiting.append(client().lease(key(1), 60, told.append)))
            other.start()
            other.join(4)  # longer than the lease lasts without a beat
            assert not waiting
            assert told
            holder.kill()
            holder.wait()
            other.join()
        finally:
            holder.kill()
    assert isinstance(waiting[0], Lease)
    waiting[0].release()
