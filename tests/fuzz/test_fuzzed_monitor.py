"""The monitor in rannc-run among strangers, and among watchers that send what none sends: the job ends in order."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import pytest
from fuzz.mutation import Mutator
from fuzz.strangers import LONG_S, SEED, Strangers
from fuzz.watched import Found
from idle_errand import IdleErrand

from rannd.ranks import admission
from rannd.ranks.admission import introduce
from rannd.runner.elastic.rescue_plan import plan_rescue
from rannd.runner.report import report
from rannd.runner.watch import line_channel, monitor, wire
from rannd.runner.watch.errand import HeldPart, RescueOrder
from rannd.runner.watch.line_channel import Listener
from rannd.runner.watch.monitor import JobResult, Monitor
from rannd.runner.watch.notice_socket import MOST_S, Notice, Noticed, NoticeSocket

BATCHES, ROUNDS = 5, 150
GROWTH = 256 << 20
EXIT = {"status": 0, "time": 1e9, "tail": "", "ordered": 0, "leftovers": []}
FRAMES = [
    ["H", {"rank": 1, "host": "host", "pid": 7}],
    ["O", "output\n"],
    ["E", "error\n"],
    ["X", {**EXIT, "status": 3, "tail": "ValueError: no", "leftovers": ["8 (python)"]}],
    ["N", {"step": 3}],
    ["P", {"host": "c", "seconds": 120.0}],
    ["D", {"held": [{"number": 2, "step": 9, "rank": 0, "size": 1, "folder": "/nowhere"}]}],
    ["W", {"error": "No space left on device"}],
]
"""Kind and payload of what a watcher sends."""


class Errand(IdleErrand):
    """Checks what it is given."""

    leave_s = rescue_s = 0.05

    def __init__(self) -> None:
        self.notices = self.rescues = 0

    def take_note(self, note: dict[str, Any]) -> None:
        assert isinstance(note, dict)

    def take_notice(self, notice: Notice, rank: int) -> Noticed:
        assert notice.host.isprintable()
        assert 0 <= notice.seconds <= MOST_S
        assert rank in (0, 1)
        self.notices += 1
        return Noticed(True, "heard")

    def plan_rescue(self, held: Mapping[int, Sequence[HeldPart]], *, failed: bool) -> RescueOrder | None:
        order = plan_rescue(held, -1)
        self.rescues += order is not None
        return order

    def end_rescue(self, order: RescueOrder, error: str) -> None:
        assert set(order.parts) <= {0, 1}


class Watcher:
    """A rank's watcher that does what it should."""

    def __init__(self, listener: Listener, rank: int) -> None:
        self._channel = line_channel.connect(listener.address, listener.token)
        self._channel.settimeout(LONG_S)
        self._reader = wire.FrameReader()
        self._send(wire.encode_json(wire.HELLO, rank=rank, host="host", pid=1 << 30))

    def end(self) -> None:
        """Say that the rank has ended well."""
        self._send(wire.encode_json(wire.EXIT, **EXIT))
        self._send(wire.encode_json(wire.DONE, held=[]))

    def gets(self, wanted: bytes) -> bool:
        """Whether a frame of this kind comes before the connection ends."""
        while data := self._channel.recv(1 << 16):
            if any(kind == wanted for kind, _ in self._reader.feed(data)):
                return True
        return False

    def readable(self) -> bool:
        """Whether something comes within a moment."""
        return bool(select.select([self._channel], [], [], 0.05)[0])

    def close(self) -> None:
        self._channel.close()

    def _send(self, data: bytes) -> None:
        self._channel.sendall(data)


def run(
    listener: Listener, size: int, found: Found, peers: Callable[[], None], errand: Errand | None = None
) -> JobResult:
    """The monitor of a job, while `peers` connect to it; the launcher, which starts nothing, ends after them."""
    errors: list[BaseException] = []
    launcher = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def come() -> None:
        try:
            peers()
        except BaseException as exc:
            errors.append(exc)
        finally:
            launcher.terminate()

    def allowed(event: str, arguments: tuple[Any, ...]) -> bool:
        return event == "socket.__new__" or (event == "os.kill" and arguments[0] == launcher.pid)

    thread = threading.Thread(target=come)
    watching = Monitor(listener, launcher, size, range(size), 0.05, errand=errand)
    thread.start()
    with found.watched(allowed):
        result = watching.run()
    thread.join()
    if errors:
        raise errors[0]
    return result


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "ANSWER_S", 0.2)
    monkeypatch.setattr(monitor, "_LAUNCHER_EXIT", 0.2)
    monkeypatch.setattr(monitor, "_HELLO_S", 0.1)


@pytest.mark.parametrize("remote", [None, "127.0.0.1"], ids=["AF_UNIX", "TCP"])
@pytest.mark.parametrize("batches", [BATCHES, pytest.param(20 * BATCHES, marks=pytest.mark.full)])
def test_strangers(batches: int, remote: str | None) -> None:
    listener, found, slowest = Listener(remote), Found(), 0.0

    def knock() -> socket.socket:
        if remote is None:
            channel = socket.socket(socket.AF_UNIX)
            channel.connect("\0" + str(listener.address[1]))
            return channel
        return socket.create_connection((remote, int(listener.address[2])))

    frames = [wire.encode_json(wire.HELLO, rank=0, host="host", pid=1), wire.encode_json(wire.DONE, held=[])]
    strangers = Strangers(2, knock, listener.token, frames)

    def come() -> None:
        nonlocal slowest
        watchers: list[Watcher] = []
        for batch in range(batches):
            strangers.come(20, silent=100 if batch % 3 == 2 else 20)
            begin = time.monotonic()
            watchers.append(Watcher(listener, batch))
            while not watchers[-1].readable():
                os.kill(os.getpid(), signal.SIGUSR1)  # which the monitor passes on to those whom it has heard of
                assert time.monotonic() < begin + LONG_S, "a watcher is not served"
            assert watchers[-1].gets(wire.SIGNAL)
            slowest = max(slowest, time.monotonic() - begin)
            strangers.leave()
        for watcher in watchers:
            watcher.end()
        assert all(watcher.gets(wire.QUIT) for watcher in watchers)
        for watcher in watchers:
            watcher.close()

    result = run(listener, batches, found, come)
    assert sorted((end.rank, end.status) for end in result.ends) == [(rank, 0) for rank in range(batches)]
    assert found.violations == []
    assert found.grown < GROWTH
    print(f"{strangers.came} strangers at the monitor of {batches} ranks; a watcher waits {slowest:.1f} s at most")


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(20 * ROUNDS, marks=pytest.mark.full)])
def test_watchers(rounds: int, capfd: pytest.CaptureFixture[str]) -> None:
    mutator, chance, found, sent, told = Mutator(SEED + 8), random.Random(SEED), Found(), 0, 0
    errand = Errand()
    for _ in range(rounds):
        listener = Listener("127.0.0.1")  # where another machine's pid is nobody's here

        def come(listener: Listener = listener) -> None:
            nonlocal sent
            watcher = Watcher(listener, 0)
            with socket.create_connection(("127.0.0.1", int(listener.address[2])), timeout=LONG_S) as other:
                introduce(other, listener.token)
                with contextlib.suppress(ConnectionError):
                    for data in _encoded(mutator.mutated(FRAMES), chance):
                        other.sendall(data)
                        sent += 1
            watcher.end()
            watcher.close()

        result = run(listener, 2, found, come, errand)
        assert (0, 0) in [(end.rank, end.status) for end in result.ends]
        told += bool(report(result, "mpirun", range(2), None))
    capfd.readouterr()
    assert found.violations == []
    assert found.grown < GROWTH
    assert sent > rounds
    assert errand.notices
    assert errand.rescues
    assert told
    with capfd.disabled():
        print(f"{rounds} jobs with {sent} mutated frames of watchers, {told} end with a report")


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(20 * ROUNDS, marks=pytest.mark.full)])
def test_notices_of_hosts_that_go(rounds: int) -> None:
    """What is sent to the socket that `rannc-run notify-preempt` connects to."""
    mutator, chance, found, heard = Mutator(SEED + 9), random.Random(SEED), Found(), 0
    listening = NoticeSocket()
    for _ in range(rounds):
        with socket.socket(socket.AF_UNIX) as guest:
            guest.connect("\0" + listening.name)
            with contextlib.suppress(ConnectionError):
                for data in _encoded(mutator.mutated([FRAMES[5]]), chance):
                    guest.sendall(data)
            with found.watched(lambda event, arguments: event == "socket.__new__"):
                for notice in listening.hear():
                    assert notice.host.isprintable()
                    assert 0 <= notice.seconds <= MOST_S
                    heard += 1
                    listening.answer(Noticed(True, "heard"))
    with found.watched():
        assert listening.hear() == [], "guests that have gone leave their places"
    listening.close()
    assert found.violations == []
    assert found.grown < GROWTH
    assert heard
    print(f"{rounds} guests, {heard} with a notice that is one")


def _encoded(frames: Any, chance: random.Random) -> list[bytes]:
    """What is sent for changed frames: some are cut off, or say that they are longer."""
    found = []
    for each in frames if isinstance(frames, list) else [frames]:
        kind, payload = (each[0], each[1]) if isinstance(each, list) and len(each) > 1 else (each, "")
        letter = kind.encode(errors="replace")[:1] if isinstance(kind, str) else chance.choice(sorted(wire.KINDS))
        try:
            content = payload.encode() if isinstance(payload, str) else msgspec.json.encode(payload)
        except (OverflowError, RecursionError, UnicodeEncodeError, TypeError):
            continue
        data = letter + len(content).to_bytes(4, "big") + content
        if chance.random() < 0.05:
            torn = [data[:-1], data[1:], data + b"\0", data[:1] + chance.randbytes(4) + data[5:]]
            data = chance.choice(torn)
        found.append(data)
    return found
