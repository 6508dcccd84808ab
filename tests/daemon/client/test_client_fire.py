"""The daemon under fire: killed in the middle of writes, fed with garbage, full, asked by many at once."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from asking import state
from daemon_requests import REQUESTS
from other_rannd import copy_of, run

from rannd.daemon.client.cache import Client, Lease, connect
from rannd.daemon.common import keys, protocol
from rannd.daemon.common.paths import places

MIB = 1 << 20
ROUNDS = [15, pytest.param(50, marks=pytest.mark.full)]


def key(number: int) -> keys.Key:
    return keys.make_key("trace", {"number": number})


def connected() -> Client:
    return connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)


@pytest.fixture
def client(daemon_home) -> Iterator[Client]:
    with connected() as made:
        assert made.connected
        yield made


# -- killed --------------------------------------------------------------------------------------------------------

WRITTEN = "        self._store.put(request.entries, request.version, keep=self._leases.keys())"
KILLED = (
    "        known = self._store.stored_since(request.entries[0].key, 0.0)\n"
    "        self._store.put(request.entries, request.version, keep=self._leases.keys())\n"
    "        known or os.kill(os.getpid(), signal.SIGKILL)"
)
WRITER = """
import sys
from rannd.daemon.common import keys
from rannd.daemon.client.cache import connect
with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
    for number in range(int(sys.argv[1])):
        key = keys.make_key("trace", {"number": number})
        assert client.put(key, bytes([number]) * 30_000)
        print(number)
"""


@pytest.mark.parametrize("rounds", ROUNDS)
def test_killed_between_write_and_acknowledgement(rounds: int, daemon_home, tmp_path: Path) -> None:
    """A daemon that kills itself when it has written what it did not know, and has not yet said so."""
    done = run(copy_of(tmp_path, {WRITTEN: KILLED}), WRITER, str(rounds))
    assert (done.stderr, done.stdout.split()) == ("", [str(number) for number in range(rounds)])
    assert Path(places().log).read_text().count("listens at") == rounds + 1, "so often it was killed"
    daemon_home.end_daemons()
    with connected() as client:  # of this rannd, which does not kill itself
        assert client.get_many([key(number) for number in range(rounds)]) == [
            bytes([number]) * 30_000 for number in range(rounds)
        ]
    assert state().statistics.corrupt == 0


@pytest.mark.parametrize("rounds", ROUNDS)
def test_killed_at_any_moment(rounds: int, daemon_home) -> None:
    acknowledged: list[int] = []
    stop = threading.Event()

    def value(number: int) -> bytes:
        return random.Random(number).randbytes(1 + number % 40_000)

    def write() -> None:
        with connected() as client:
            number = 0
            while not stop.is_set():
                if client.put(key(number), value(number)):
                    acknowledged.append(number)
                number += 1
            tried.append(number)

    tried: list[int] = []
    writer = threading.Thread(target=write)
    chance = random.Random(3)
    with connected() as client:
        writer.start()
        try:
            for _ in range(rounds):
                seen = len(acknowledged)
                deadline = time.monotonic() + 60
                # It writes again. The first may be the killed daemon's answer; a kill then hits a starting daemon.
                while len(acknowledged) < seen + 2:
                    assert time.monotonic() < deadline
                    select.select([], [], [], 0.001)
                select.select([], [], [], chance.random() * 0.01)
                for pid in daemon_home.pids():
                    os.kill(pid, signal.SIGKILL)
        finally:
            stop.set()
            writer.join()
        assert len(acknowledged) >= rounds
        there = client.get_many([key(number) for number in range(tried[0])])
    lost = [number for number in acknowledged if there[number] != value(number)]
    assert lost == []
    halves = [number for number, found in enumerate(there) if found not in (None, value(number))]
    assert halves == []
    assert state().statistics.corrupt == 0


# -- garbage -------------------------------------------------------------------------------------------------------

MESSAGES = 10_000
WARM = 2_000
MARK = protocol.Misses
"""Sent last over a connection: what came before has been dealt with when it is answered."""
LARGE = protocol.Put("1", [protocol.NewEntry(key(0).digest, "trace", {"a": "1"}, bytes(64 << 10))])
VALID = [msgspec.msgpack.encode(each) for each in [*REQUESTS, LARGE] if not isinstance(each, protocol.Stop | MARK)]
HEADERS = [b"rannd/1", b"rannd/2", b"rannd/3", b"rannd/0", b"rannd/", b"", b"hello"]


def mutated(chance: random.Random) -> list[bytes]:
    """Frames of a message: a valid one, one with some bytes other, missing or more, or noise; any header."""
    body = bytearray(chance.choice(VALID))
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        place = chance.randrange(len(body) + 1)
        match chance.randrange(4):
            case 0:
                body[place : place + 1] = chance.randbytes(1)
            case 1:
                del body[place : place + chance.randrange(1, 20)]
            case 2:
                body[place:place] = chance.randbytes(chance.randrange(1, 20))
            case 3:
                body[place:place] = body[: chance.randrange(len(body) + 1)]
    content = bytes(body) if chance.random() < 0.9 else chance.randbytes(chance.randrange(2000))
    frames = [b"", chance.choice(HEADERS if chance.random() < 0.5 else HEADERS[:2]), content]
    if chance.random() < 0.1:
        frames[chance.randrange(3) :] = [chance.randbytes(chance.randrange(50)) for _ in range(chance.randrange(4))]
    return frames or [b""]


def fire(seed: int, number: int) -> int:
    """Send `number` messages over one connection; how many answers have come."""
    chance = random.Random(seed)
    answers = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(f"ipc://{places().socket}")
        for _ in range(number):
            peer.send_multipart(mutated(chance))
            while peer.poll(0):
                peer.recv_multipart()
                answers += 1
        peer.send_multipart([b"", *protocol.encode(MARK())])
        while peer.poll(60_000):
            answers += 1
            try:
                if isinstance(protocol.decode_reply(peer.recv_multipart()[1:]), protocol.Missed):
                    break
            except protocol.VersionError:
                continue  # to a message of another version
    return answers


def test_10000_messages_of_garbage(client: Client, daemon_home) -> None:
    """It lives, answers, gets neither larger nor runs out of descriptors."""
    daemon = psutil.Process(daemon_home.pids()[0])
    lease = client.lease(key(-1), 0)  # whatever idle time is asked for now, the daemon stays
    assert isinstance(lease, Lease)
    step = 250

    def rounds(first: int, last: int) -> int:
        answers = 0
        for seed in range(first, last, step):
            answers += fire(seed, step)
            with socket.socket(socket.AF_UNIX) as peer:  # and one that does not speak ZeroMQ at all
                peer.connect(places().socket)
                peer.send(random.Random(seed).randbytes(500))
            assert state().pid == daemon.pid
        return answers

    rounds(0, WARM)
    size, descriptors = daemon.memory_info().rss, daemon.num_fds()
    answers = rounds(WARM, MESSAGES)
    assert answers > (MESSAGES - WARM) // 2, "most were understood as questions"
    assert daemon.memory_info().rss - size < 10 * MIB
    deadline = time.monotonic() + 60  # libzmq closes a connection a moment after its peer
    while daemon.num_fds() > descriptors + 5 and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    assert daemon.num_fds() <= descriptors + 5
    now = state()
    assert now.rejected > MESSAGES // 10
    assert now.statistics.corrupt == 0
    with connected() as other:  # whose limits are those of sane people
        assert other.put(key(1), b"x")
        assert other.get(key(1)) == b"x"
    lease.release()
    assert daemon_home.pids() == [daemon.pid]


# -- many ----------------------------------------------------------------------------------------------------------

HERD = """
import os
from rannd.daemon.common import keys
from rannd.daemon.client.cache import connect

def be_one(mine):
    with connect(mode="on", timeout_s=100, idle_s=600, max_bytes=1 << 30) as client:
        for number in range(20):
            key = keys.make_key("trace", {"mine": mine, "number": number})
            assert client.get(key) is None
            assert client.put(key, b"%d %d" % (mine, number))
            assert client.get(key) == b"%d %d" % (mine, number)
        assert client.connected

children = []
for mine in range(64):
    child = os.fork()
    if child == 0:
        try:
            be_one(mine)
            os._exit(0)
        finally:
            os._exit(1)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children] == [0] * 64)
"""


def test_64_processes_at_once(daemon_home) -> None:
    """None of them knows of a daemon when it begins."""
    done = run({}, HERD)
    assert (done.stdout, done.stderr) == ("True\n", "")
    assert len(daemon_home.pids()) == 1
    assert state().entries == 64 * 20


# -- full ----------------------------------------------------------------------------------------------------------


def test_with_10000_entries_it_is_small(client: Client, daemon_home) -> None:
    chance = random.Random(1)

    def profile(number: int) -> keys.Key:
        return keys.profile_key(
            block_hash=f"{number:064x}",
            device_model="cpu",
            threads=1,
            versions={"python": "3", "torch": "2", "rannd": "0"},
            flags={},
        )

    many = [profile(number) for number in range(10_000)]
    values = [chance.randbytes(chance.randrange(1000, 2000)) for _ in many]
    assert client.put_many(zip(many, values, strict=True)) == len(many)
    assert client.get_many(many) == values
    assert client.why(profile(10_000))[1].startswith("the nearest profile")
    assert state().entries == len(many)
    assert psutil.Process(daemon_home.pids()[0]).memory_info().rss < 60 * MIB
