"""The command `rannd`, as a user types it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_prometheus import parse

from rannd.daemon.client import request_channel
from rannd.daemon.client.cache import Lease, connect
from rannd.daemon.common import keys, protocol
from rannd.daemon.common.paths import places

RANND = str(Path(sys.executable).parent / "rannd")


def rannd(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RANND, *words], capture_output=True, text=True, check=False, timeout=120)


def test_a_life(daemon_home) -> None:
    down = rannd("status")
    assert (down.returncode, down.stdout[:14]) == (3, "no daemon runs")
    assert list(daemon_home.runtime.iterdir()) == [], "a look starts nothing"
    started = rannd("start")
    (pid,) = daemon_home.pids()
    assert (started.returncode, started.stdout) == (0, f"rannd 0.1.0, pid {pid}, started\n")
    assert rannd("start").stdout == f"rannd 0.1.0, pid {pid}, runs already\n"
    up = rannd("status")
    assert up.returncode == 0
    assert f"pid {pid}" in up.stdout
    assert "exits after 1800 s without work" in up.stdout
    assert "started" in rannd("restart").stdout
    (second,) = daemon_home.pids()
    assert second != pid
    assert rannd("stop").stdout == "the daemon has ended\n"
    assert daemon_home.pids() == []
    again = rannd("stop")
    assert (again.returncode, again.stdout) == (0, "no daemon runs\n")


def test_what_is_in_the_way_of_lock_or_log_is_told(daemon_home) -> None:
    here = places()
    here.secure_runtime()
    Path(here.log).symlink_to("/tmp/elsewhere")
    told = rannd("start")
    assert (told.returncode, told.stderr.count("\n")) == (6, 1)
    assert f"the log {here.log} cannot be opened" in told.stderr
    Path(here.spawn).unlink()
    Path(here.spawn).mkdir()
    told = rannd("start")
    assert (told.returncode, told.stderr.count("\n")) == (6, 1)
    assert f"the lock {here.spawn} cannot be opened" in told.stderr


@pytest.mark.parametrize("verb", ["stop", "restart"])
def test_a_daemon_that_does_not_answer_cannot_be_stopped_but_is_named(
    daemon_home, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    rannd("start")
    (pid,) = daemon_home.pids()
    monkeypatch.setenv("RANNC_DAEMON_TIMEOUT_S", "0.5")
    os.kill(pid, signal.SIGSTOP)
    told = rannd(verb)
    assert told.returncode == 6
    assert f"`kill -9 {pid}`" in told.stderr


def test_status_asks_nobody_in_a_directory_that_others_could_have_prepared(daemon_home) -> None:
    rannd("start")
    Path(places().runtime).chmod(0o755)
    told = rannd("status")
    assert (told.returncode, told.stdout) == (6, "")
    assert "chmod 700" in told.stderr


def test_status_as_json(daemon_home) -> None:
    down = rannd("status", "--json")
    assert down.returncode == 3
    assert json.loads(down.stdout)["running"] is False
    rannd("start")
    up = json.loads(rannd("status", "--json").stdout)
    assert up["running"] is True
    assert [up["pid"]] == daemon_home.pids()
    assert up["protocol"] == protocol.PROTOCOL
    assert up["leases"] == []
    assert up["statistics"]["hits"] == 0


@pytest.fixture
def used(daemon_home) -> Iterator[int]:
    """A daemon that has had hits, misses, an error, and has a lease with one who waits; pid of its holder."""
    found, missed, made = (keys.make_key("trace", {"number": number}) for number in range(3))
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
        assert client.put(found, b"x")
        client.get_many([found, missed, missed])
        client.get(keys.make_key("limit", {"x": 1}))
        request_channel.ask(places().socket, protocol.Put("1", [_wrong(found, missed)]), time.monotonic() + 60)
        lease = client.lease(made, 0, who="rank 0 of job 4711\x1b[1m")
        assert isinstance(lease, Lease)
        with lease:
            lease.progress("profiling, 40 %")  # its own thread says so within a second, this line at once
            assert client._beat(made, lease._token, "profiling, 40 %")
            yield os.getpid()


def _wrong(key: keys.Key, other: keys.Key) -> protocol.NewEntry:
    """The daemon refuses it, and remembers that."""
    return protocol.NewEntry(key.digest, key.kind, other.components, b"x")


def test_status_tells_of_clients_counts_leases_and_errors(used: int) -> None:
    told = rannd("status").stdout.splitlines()
    assert told[2] == "clients   2 within the last minute", "this test and the command"
    assert "hits      1 (trace 1)" in told
    assert "misses    4 (limit 1, trace 3)" in told
    (lease,) = [line for line in told if line.startswith("lease ")]
    made = keys.make_key("trace", {"number": 2}).short
    assert lease.startswith(f"lease     {made} held by rank 0 of job 4711?[1m (process {used}) for ")
    assert lease.endswith(" s, profiling, 40 %, 0 waiting")
    (error,) = [line for line in told if line.startswith("error ")]
    assert error.startswith("error     20")
    assert error.endswith(" does not match its components; it is not stored")


def test_status_as_json_has_all_of_it(used: int) -> None:
    told = json.loads(rannd("status", "--json").stdout)
    assert told["clients"] == 2
    assert told["kinds"] == {"limit": {"hits": 0, "misses": 1}, "trace": {"hits": 1, "misses": 3}}
    assert [(lease["who"][:8], lease["progress"]) for lease in told["leases"]] == [("rank 0 o", "profiling, 40 %")]
    assert [each["text"][-13:] for each in told["errors"]] == ["is not stored"]


def test_status_for_prometheus(used: int) -> None:
    up = rannd("status", "--prometheus")
    assert up.returncode == 0
    told = {name: samples for name, (_, samples) in parse(up.stdout).items()}
    assert told["rannd_up"] == {"": 1}
    assert told["rannd_misses_total"] == {'{kind="limit"}': 1, '{kind="trace"}': 3}
    assert told["rannd_leases"] == {"": 1}


def test_status_for_prometheus_of_a_daemon_that_is_not_there(daemon_home) -> None:
    down = rannd("status", "--prometheus")
    assert down.returncode == 3
    assert {name: samples for name, (_, samples) in parse(down.stdout).items()} == {"rannd_up": {"": 0}}


def test_one_format_at_a_time(daemon_home) -> None:
    both = rannd("status", "--prometheus", "--json")
    assert (both.returncode, both.stdout) == (2, "")


def test_the_configuration_sets_the_limits(daemon_home, monkeypatch) -> None:
    (daemon_home.conf / "rannc_conf.toml").write_text("daemon_idle_s = 77.0\n")
    monkeypatch.setenv("RANNC_CACHE_MAX_GB", "0.5")
    rannd("start")
    up = json.loads(rannd("status", "--json").stdout)
    assert (up["idle_s"], up["max_bytes"]) == (77.0, 1 << 29)


def test_a_wrong_configuration_is_named(daemon_home, monkeypatch) -> None:
    monkeypatch.setenv("RANNC_DAEMON_IDLE_S", "soon")
    failed = rannd("start")
    assert failed.returncode == 2
    assert "RANNC_DAEMON_IDLE_S" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_start_that_fails_says_why(daemon_home) -> None:
    (daemon_home.runtime / "rannd").symlink_to(daemon_home.base)
    failed = rannd("start")
    assert failed.returncode == 6
    assert "symbolic link" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_run_stays_in_the_foreground(daemon_home) -> None:
    with subprocess.Popen([RANND, "run", "--idle", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stderr is not None
        assert f"pid {daemon.pid}, listens at".encode() in daemon.stdout.readline()
        assert rannd("start").stdout.endswith("runs already\n")
        up = rannd("status")
        assert "never exits by itself" in up.stdout, "a client's configuration does not change what was typed"
        second = rannd("run")
        assert second.returncode == 6
        assert "already" in second.stderr
        daemon.send_signal(signal.SIGINT)
        assert daemon.wait() == 0
        assert b"ends: SIGINT" in daemon.stderr.read()


def test_run_exits_when_idle(daemon_home) -> None:
    ended = rannd("run", "--idle", "0.05")
    assert ended.returncode == 0
    assert "nothing to do for 0.05 s" in ended.stderr


def test_stop_waits_for_the_end(daemon_home) -> None:
    rannd("start")
    (pid,) = daemon_home.pids()
    watch = os.pidfd_open(pid)
    rannd("stop")
    assert select.select([watch], [], [], 60)[0]
    os.close(watch)


def test_help_names_every_command() -> None:
    told = rannd("--help").stdout
    assert all(f"\n  {name} " in told for name in ("start", "stop", "restart", "status", "run", "install-service"))
