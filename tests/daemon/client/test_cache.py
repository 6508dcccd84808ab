"""The cache helps where it can, and costs one warning where it cannot."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rannd.daemon.client.cache import Client, Lease, Mode, connect
from rannd.daemon.common import keys, protocol
from rannd.daemon.common.listening import answers
from rannd.daemon.common.paths import places
from rannd.daemon.server import boot


def key(number: int) -> keys.Key:
    return keys.make_key("trace", {"number": number})


def client(mode: Mode = "on", timeout_s: float = 60, max_bytes: int = 1 << 30) -> Client:
    return connect(mode=mode, timeout_s=timeout_s, idle_s=600, max_bytes=max_bytes)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "rannd.Daemon" and record.levelno >= logging.WARNING
    ]


def test_what_is_put_is_got(daemon_home, caplog: pytest.LogCaptureFixture) -> None:
    with client() as cache:
        assert cache.get(key(1)) is None
        assert cache.put(key(1), b"one")
        assert cache.put(key(2), b"")
        assert cache.get_many([key(1), key(3), key(2)]) == [b"one", None, b""]
        assert cache.put(key(1), b"another")
        assert cache.get(key(1)) == b"another"
    assert warnings(caplog) == []


def test_large_values_and_long_lists_are_split(daemon_home) -> None:
    with client() as cache:
        items = [(key(number), bytes([number % 256]) * 10) for number in range(protocol.MAX_BATCH * 2 + 3)]
        assert cache.put_many(items) == len(items)
        assert cache.get_many([name for name, _ in items]) == [value for _, value in items]
        heavy = [(key(10_000 + number), os.urandom(9 << 20)) for number in range(5)]
        assert cache.put_many(heavy) == 5
        assert cache.get_many([name for name, _ in heavy]) == [value for _, value in heavy]


def test_long_components_are_split_too(daemon_home, caplog: pytest.LogCaptureFixture) -> None:
    """The daemon hangs up on a message above its limit, whatever makes it long."""
    many = [(keys.make_key("trace", {"number": number, "text": "x" * 900_000}), b"value") for number in range(80)]
    with client() as cache:
        assert cache.put_many(many) == 80
        assert cache.connected
    assert warnings(caplog) == []


SCARCE = """
import logging, os, resource
from rannd.daemon.client.cache import connect
from rannd.daemon.common import keys

logging.basicConfig(format="%(message)s")
lowest = os.dup(0)
os.close(lowest)
for left in range(64):
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, lowest + left))
        cache = connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)
        print(left, cache.connected, cache.get(keys.make_key("trace", {"number": 1})), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, f"with {left} descriptors left"
"""


def test_without_descriptors_a_job_goes_on_without_a_cache(daemon_home) -> None:
    """libzmq would abort the process, with two to four left."""
    client().put(key(1), b"x")
    done = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert told.index("True b'x'") > 7
    assert told[-1] == "True b'x'"
    # Connecting takes some, then too few are left to ask; libzmq's thread closes what it has used a little later.
    without = [each for each in told if each != "True b'x'"]
    assert set(without) <= {"False None", "True None"}
    assert len(done.stderr.splitlines()) == len(without)
    for line in done.stderr.splitlines():
        assert "oo many open files" in line or "or raise the limit (ulimit -n)" in line
        assert line.endswith("; the job continues without a cache")


CROWDED = """
import os, resource
from rannd.daemon.client.cache import connect

resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
opened = os.open(os.devnull, os.O_RDONLY)
while os.dup(opened) < 1100:
    pass
print(connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30).connected)
"""


def test_the_daemon_is_started_by_a_process_with_many_open_files(daemon_home) -> None:
    """select() takes no descriptor above 1023, and ranks of large jobs have more."""
    done = subprocess.run([sys.executable, "-c", CROWDED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_limits_beyond_all_measure_are_no_hindrance(daemon_home, caplog: pytest.LogCaptureFixture) -> None:
    with connect(mode="on", timeout_s=60, idle_s=1e12, max_bytes=10**40) as cache:
        assert cache.put(key(1), b"x")
    assert warnings(caplog) == []


def test_off_touches_nothing(daemon_home, caplog: pytest.LogCaptureFixture) -> None:
    cache = client("off")
    assert not cache.connected
    assert (cache.get(key(1)), cache.put(key(1), b"x"), cache.lease(key(1), 10)) == (None, False, None)
    cache.discard(key(1), "x")
    assert list(daemon_home.runtime.iterdir()) == list(daemon_home.cache.iterdir()) == []
    assert warnings(caplog) == []


def test_readonly_reads(daemon_home) -> None:
    client().put(key(1), b"x")
    cache = client("readonly")
    assert cache.get(key(1)) == b"x"
    assert cache.lease(key(1), 10) == b"x"
    assert cache.lease(key(2), 10) is None
    assert not cache.put(key(2), b"y")
    cache.discard(key(1), "no")
    assert client().get_many([key(1), key(2)]) == [b"x", None]


def test_refresh_reads_nothing_and_overwrites(daemon_home) -> None:
    client().put(key(1), b"old")
    cache = client("refresh")
    assert cache.get(key(1)) is None
    lease = cache.lease(key(1), 10)
    assert isinstance(lease, Lease)
    with lease:
        assert cache.put(key(1), b"new")
    assert client().get(key(1)) == b"new"


def test_discarded_values_are_gone(daemon_home) -> None:
    with client() as cache:
        cache.put(key(1), b"x")
        cache.discard(key(1), "out of memory while running")
        assert cache.get(key(1)) is None


# -- leases ------------------------------------------------------------------------------------------------------


def test_a_hit_needs_no_lease(daemon_home) -> None:
    with client() as cache:
        cache.put(key(1), b"x")
        assert cache.lease(key(1), 10) == b"x"


def waiting(state: Callable[[], protocol.State], number: int) -> None:
    """Return when `number` clients wait for leases: the daemon's own word, not a guess of how long it takes."""
    deadline = time.monotonic() + 60
    while sum(lease.waiting for lease in state().leases) != number:
        assert time.monotonic() < deadline
        os.sched_yield()


def test_who_waits_gets_the_value(daemon_home) -> None:
    cache = client()
    lease = cache.lease(key(1), 0)
    assert isinstance(lease, Lease)
    told: list[str] = []
    got: list[bytes | Lease | None] = []
    other = threading.Thread(target=lambda: got.append(client().lease(key(1), 60, told.append)))
    other.start()
    assert cache._session is not None
    waiting(cache._session.state, 1)
    cache.put(key(1), b"made")
    other.join()
    lease.release()
    assert got == [b"made"]
    assert len(told) == 1
    assert f"process {os.getpid()} " in told[0]
    assert cache.get(key(1)) == b"made"


def test_who_waits_in_refresh_mode_gets_the_new_value(daemon_home) -> None:
    client().put(key(1), b"old")
    cache = client("refresh")
    lease = cache.lease(key(1), 0)
    assert isinstance(lease, Lease)
    got: list[bytes | Lease | None] = []
    other = threading.Thread(target=lambda: got.append(client("refresh").lease(key(1), 60)))
    other.start()
    assert cache._session is not None
    waiting(cache._session.state, 1)
    cache.put(key(1), b"new")
    other.join()
    assert got == [b"new"]


def test_a_released_lease_goes_on(daemon_home) -> None:
    cache = client()
    lease = cache.lease(key(1), 0)
    assert isinstance(lease, Lease)
    got: list[bytes | Lease | None] = []
    other = threading.Thread(target=lambda: got.append(client().lease(key(1), 60)))
    other.start()
    assert cache._session is not None
    waiting(cache._session.state, 1)
    lease.release()
    lease.release()
    other.join()
    assert isinstance(got[0], Lease)
    assert cache.lease(key(1), 0) is None, "a wait in vain"
    got[0].release()
    assert isinstance(cache.lease(key(1), 0), Lease)


PLANNER = """
import sys, time
from rannd.daemon.common import keys
from rannd.daemon.client.cache import Lease, connect
key = keys.make_key("trace", {"number": 1})
with connect(mode="on", timeout_s=120, idle_s=600, max_bytes=1 << 30) as client:
    sys.stdin.readline()
    found = client.lease(key, 120)
    if isinstance(found, Lease):
        with found, open(sys.argv[1], "a") as plans:
            plans.write("planned\\n")
            time.sleep(0.2)  # the work that must happen once
            assert client.put(key, b"the plan")
            found = b"the plan"
    print(found)
"""


def test_of_16_processes_that_miss_one_key_one_makes_it(daemon_home) -> None:
    plans = daemon_home.base / "plans"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PLANNER, str(plans)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(16)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    assert [rank.communicate()[0] for rank in ranks] == ["b'the plan'\n"] * 16
    assert plans.read_text() == "planned\n"


HOLDER = """
import sys
from rannd.daemon.common import keys
from rannd.daemon.client.cache import Lease, connect
client = connect(mode="on", timeout_s=120, idle_s=600, max_bytes=1 << 30)
found = client.lease(keys.make_key("trace", {"number": 1}), 0)
print(isinstance(found, Lease), flush=True)
sys.stdin.read()
"""


def test_a_lease_ends_when_its_holder_dies(daemon_home) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        cache = client()
        got: list[bytes | Lease | None] = []
        other = threading.Thread(target=lambda: got.append(client().lease(key(1), 120)))
        other.start()
        assert cache._session is not None
        waiting(cache._session.state, 1)
        holder.send_signal(signal.SIGKILL)
        other.join()
    assert isinstance(got[0], Lease)


def test_a_lease_whose_daemon_dies_is_no_hindrance(daemon_home) -> None:
    cache = client()
    lease = cache.lease(key(1), 0)
    assert isinstance(lease, Lease)
    os.kill(daemon_home.pids()[0], signal.SIGKILL)
    assert cache.put(key(1), b"x")
    lease.release()
    assert client().lease(key(1), 10) == b"x"


# -- what goes wrong ---------------------------------------------------------------------------------------------


def all_miss(cache: Client) -> bool:
    cache.discard(key(1), "x")
    return (
        cache.get(key(1)) is None
        and cache.get_many([key(1), key(2)]) == [None, None]
        and not cache.put(key(1), b"x")
        and cache.put_many([(key(1), b"x"), (key(2), b"y")]) == 0
        and cache.lease(key(1), 10) is None
        and not cache.connected
    )


def no_cache_directory(home: object, patch: pytest.MonkeyPatch) -> None:
    path = Path(os.environ["XDG_CACHE_HOME"])
    path.rmdir()
    path.write_text("a file is in the way, for root too")


def no_runtime_directory(home: object, patch: pytest.MonkeyPatch) -> None:
    (Path(os.environ["XDG_RUNTIME_DIR"]) / "rannd").write_text("a file is in the way")


def linked_runtime_directory(home: object, patch: pytest.MonkeyPatch) -> None:
    (Path(os.environ["XDG_RUNTIME_DIR"]) / "rannd").symlink_to("/tmp")


def not_utf8(home: object, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("XDG_CACHE_HOME", os.environ["XDG_CACHE_HOME"] + "/\udcff")


def a_folder_for_a_lock(home: object, patch: pytest.MonkeyPatch) -> None:
    Path(places().runtime).mkdir(mode=0o700)
    Path(places().use).mkdir()


def no_python(home: object, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "executable", "/nowhere/python")


def broken_installation(home: object, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(boot, "__file__", "/nowhere/boot.py")


@pytest.mark.parametrize(
    "breakage",
    [
        no_cache_directory,
        no_runtime_directory,
        linked_runtime_directory,
        not_utf8,
        a_folder_for_a_lock,
        no_python,
        broken_installation,
    ],
    ids=lambda breakage: breakage.__name__,
)
def test_without_a_daemon_one_warning_and_only_misses(
    daemon_home, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, breakage: Callable[..., None]
) -> None:
    breakage(daemon_home, monkeypatch)
    cache = client()
    assert all_miss(cache)
    cache.close()
    (told,) = warnings(caplog)
    assert told.endswith("the job continues without a cache")


def test_a_daemon_that_hangs_costs_one_warning(daemon_home, caplog: pytest.LogCaptureFixture) -> None:
    # not one of those that all_miss touches: the daemon still gets what was sent while it hung
    client().put(key(99), b"x")
    cache = client(timeout_s=0.3)
    (pid,) = daemon_home.pids()
    os.kill(pid, signal.SIGSTOP)
    assert all_miss(cache)
    os.kill(pid, signal.SIGCONT)
    (told,) = warnings(caplog)
    assert "did not answer in time" in told
    assert client().get(key(99)) == b"x"


def test_a_daemon_that_goes_for_good_costs_one_warning(
    daemon_home, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = client()
    assert cache.put(key(1), b"x")
    no_python(daemon_home, monkeypatch)
    os.kill(daemon_home.pids()[0], signal.SIGKILL)
    assert all_miss(cache)
    assert len(warnings(caplog)) == 1


def test_a_value_above_the_limit_costs_one_warning_and_nothing_else(
    daemon_home, caplog: pytest.LogCaptureFixture
) -> None:
    cache = client(max_bytes=1000)
    assert not cache.put(key(1), bytes(1001))
    assert not cache.put(key(2), bytes(1002))
    assert cache.put(key(3), bytes(999))
    assert cache.get(key(3)) == bytes(999)
    (told,) = warnings(caplog)
    assert "cache_max_gb" in told


def test_a_closed_client_misses_silently(daemon_home, caplog: pytest.LogCaptureFixture) -> None:
    cache = client()
    cache.close()
    assert all_miss(cache)
    assert warnings(caplog) == []
    assert answers(places().socket), "others still use the daemon"
