"""However many miss one key at once, it is made once; and once more where the first one dies or hangs over it."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from other_rannd import RUN, copy_of, run

from rannd.daemon.client import cache, request_channel
from rannd.daemon.client.cache import Client, Lease, connect
from rannd.daemon.common import keys, protocol
from rannd.daemon.common.paths import places

MANY = 64

HERD = """
import json, os, signal, sys, time
from rannd.daemon.common import keys
from rannd.daemon.client.cache import Lease, connect

many, fate, work_s, plans = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4]
key = keys.make_key("trace", {"number": 1})
gate, opened = os.pipe()
results, result = os.pipe()

def plan():
    "Of the first one, its fate; of the others, a value."
    with open(plans, "a") as file:
        file.write(f"{os.getpid()}\\n")
    if len(open(plans).read().split()) == 1:
        if fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fate == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(work_s)
    return b"made by %d" % os.getpid()

def be_one():
    os.close(opened)
    with connect(mode="on", timeout_s=100, idle_s=600, max_bytes=1 << 30) as client:
        os.read(gate, 1)
        found = client.lease(key, 100)
        if isinstance(found, Lease):
            with found:
                value = plan()
                assert client.put(key, value)
            found = value
        os.write(result, b"%d %s\\n" % (os.getpid(), found))

children = []
for _ in range(many):
    child = os.fork()
    if child == 0:
        try:
            be_one()
        finally:
            os._exit(0)
    children.append(child)
os.close(opened)
os.close(result)
first = None
left, ends = list(children), {}
while left:
    pid, status = os.waitpid(-1, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        first = pid
    else:
        ends[pid] = os.waitstatus_to_exitcode(status)
        left.remove(pid)
    if left == [first]:
        os.kill(first, signal.SIGCONT)  # when all others have theirs
got = dict(line.split(" ", 1) for line in os.fdopen(results).read().splitlines())
print(json.dumps({"ends": sorted(ends.values()), "got": got}))
"""

QUICK = {
    "LEASE_S = 30.0": "LEASE_S = 3.0",
    "BEAT_S = 10.0": "BEAT_S = 0.5",
    "TELL_S = 1.0": "TELL_S = 0.2",
}
"""A lease that ends after three seconds of silence, and a holder that beats more often."""


def herd(variables: dict[str, str], home: Path, fate: str, work_s: float, many: int = MANY) -> tuple[dict, list[str]]:
    """What became of the processes, and pids of those that made the value."""
    plans = home / "plans"
    done = run(variables, HERD, str(many), fate, str(work_s), str(plans))
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout), plans.read_text().split()


def test_of_64_processes_one_makes_it(daemon_home) -> None:
    told, plans = herd({}, daemon_home.base, "well", 0.5)
    assert len(plans) == 1
    assert told["ends"] == [0] * MANY
    assert len(told["got"]) == MANY
    assert set(told["got"].values()) == {f"made by {plans[0]}"}


def test_one_of_64_is_killed_over_it_and_one_more_makes_it(daemon_home) -> None:
    told, plans = herd({}, daemon_home.base, "killed", 0.2)
    assert len(plans) == 2
    assert told["ends"] == [-9] + [0] * (MANY - 1)
    assert plans[0] not in told["got"]
    assert set(told["got"].values()) == {f"made by {plans[1]}"}


def test_one_of_64_is_frozen_over_it_and_one_more_makes_it(daemon_home, tmp_path: Path) -> None:
    told, plans = herd(copy_of(tmp_path, QUICK), daemon_home.base, "frozen", 0.2)
    assert len(plans) == 2
    assert told["ends"] == [0] * MANY, "the frozen one goes on as well"
    thawed = told["got"].pop(plans[0])
    assert thawed == f"made by {plans[0]}"
    assert set(told["got"].values()) == {f"made by {plans[1]}"}


@pytest.mark.long
def test_a_holder_that_takes_long_and_beats_keeps_its_lease(daemon_home, tmp_path: Path) -> None:
    told, plans = herd(copy_of(tmp_path, QUICK), daemon_home.base, "well", 7.0, many=4)
    assert len(plans) == 1
    assert set(told["got"].values()) == {f"made by {plans[0]}"}


def test_who_waits_is_told_how_far_it_is(daemon_home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "TELL_S", 0.05)
    monkeypatch.setattr(cache, "SLICE_S", 0.05)
    key = keys.make_key("deployment", {"number": 1})
    told: list[str] = []

    def client() -> Client:
        return connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)

    def said(text: str) -> None:
        deadline = time.monotonic() + 60
        while not any(text in line for line in told):
            assert time.monotonic() < deadline, told
            os.sched_yield()

    lease = client().lease(key, 0, who="rank 0 of job 4711")
    assert isinstance(lease, Lease)
    got: list[bytes | Lease | None] = []
    other = threading.Thread(target=lambda: got.append(client().lease(key, 60, told.append)))
    other.start()
    said(f"rank 0 of job 4711 is computing deployment {key.short}, for ")
    lease.progress("profiling, 40 %")
    said("rank 0 of job 4711 is profiling, 40 %, for ")
    lease.progress("planning")
    said("rank 0 of job 4711 is planning, for ")
    client().put(key, b"made")
    other.join()
    lease.release()
    assert got == [b"made"]
    assert len(told) == 3, "each but once"
    assert all("waiting for it, " in line for line in told)


YEAR = 365 * 86400
CLOCK = """\
FLUSH_S = 1.0
_seconds = time.time
def _time():
    with open({file!r}) as off:
        return _seconds() + float(off.read())
time.time = _time"""


def test_leases_do_not_care_for_the_clock(daemon_home, tmp_path: Path) -> None:
    """The daemon's clock jumps a year ahead, back, and a year behind while somebody holds a lease and another waits."""
    off = tmp_path / "off"
    off.write_text("0")
    started = run(copy_of(tmp_path, {"FLUSH_S = 1.0": CLOCK.format(file=str(off))}), RUN, "start")
    assert started.returncode == 0, started.stderr
    key, there = (keys.make_key("trace", {"number": number}) for number in (1, 2))

    def client() -> Client:
        return connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)

    def ask(request: protocol.Request) -> protocol.Reply:
        return request_channel.ask(places().socket, request, time.monotonic() + 60)

    def leases() -> list[protocol.LeaseInfo]:
        reply = ask(protocol.Status())
        assert isinstance(reply, protocol.State)
        assert 0 <= reply.uptime_s < 600
        return reply.leases

    holder = client()
    holder.put(there, b"there")
    lease = holder.lease(key, 0)
    assert isinstance(lease, Lease)
    got: list[bytes | Lease | None] = []
    other = threading.Thread(target=lambda: got.append(client().lease(key, 60)))
    other.start()
    for jump in (0, YEAR, 0, -YEAR, 0):
        off.write_text(str(jump))
        deadline = time.monotonic() + 30
        while [(found.key, found.waiting) for found in leases()] != [(key.digest, 1)]:
            assert time.monotonic() < deadline
            os.sched_yield()
        assert 0 <= leases()[0].since_s < 600
        assert holder.get(there) == b"there"
        assert holder.put(there, b"there")
        listed = ask(protocol.List())
        assert isinstance(listed, protocol.Entries)
        assert abs(listed.entries[0].created - time.time() - jump) < 3600, "the clock has jumped"
        assert got == []
    holder.put(key, b"made")
    other.join()
    lease.release()
    assert got == [b"made"]
    assert [lease.key for lease in leases()] == []
