"""The daemon among mutated ZeroMQ conversations and requests: clients are served, nothing but the allowed is called."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from daemon_requests import KEY, REQUESTS
from fuzz.mutation import Mutator
from fuzz.strangers import LONG_S, SEED

from rannd.daemon.client import spawn
from rannd.daemon.client.cache import connect
from rannd.daemon.common import keys, protocol
from rannd.daemon.common.paths import places

BATCHES, AT_ONCE, SILENT = 25, 20, 20
GROWTH = 256 << 20
ASKED = [each for each in REQUESTS if not isinstance(each, protocol.Stop | protocol.Hello)]
"""Requests that neither end the daemon nor say when it ends."""
CONVERSATION = {
    "signature": b"\xff" + bytes(8) + b"\x7f",
    "version": b"\x03\x01",
    "mechanism": b"NULL".ljust(20, b"\0"),
    "rest": bytes(32),
    "commands": [{"name": b"READY", "properties": [[b"Socket-Type", b"REQ"], [b"Identity", b""]]}],
    "messages": [[b"", protocol.HEADER, b"request"]],
}
"""What a client sends by ZMTP 3.1 (https://rfc.zeromq.org/spec/37); the last frame is a request."""


def frame(flags: int, data: bytes, chance: random.Random) -> bytes:
    """One frame; now and then with other flags, or of another length than it says."""
    size, torn = len(data), chance.random() < 0.04
    if torn:
        flags = chance.choice([flags, chance.randrange(256)])
        size = chance.choice(
            [size + 1, max(size - 1, 0), 255, 1 << 20, protocol.MAX_MESSAGE + 1, 1 << 62, (1 << 64) - 1]
        )
    if size > 255 or (torn and chance.random() < 0.5):
        return bytes([flags | 2]) + size.to_bytes(8, "big") + data
    return bytes([flags, size]) + data


def encoded(talk: Any, chance: random.Random) -> tuple[bytes, bytes]:
    """The bytes of a changed conversation: a greeting, and what is sent after the daemon's greeting."""
    if not isinstance(talk, dict):
        return _bytes(talk), b""
    greeting, found = (
        b"".join(_bytes(talk.get(name, b"")) for name in ("signature", "version", "mechanism", "rest")),
        b"",
    )
    for command in _list(talk.get("commands")):
        if isinstance(command, dict):
            name = _bytes(command.get("name", b""))[:255]
            body = bytes([len(name)]) + name
            for each in _list(command.get("properties")):
                pair = [_bytes(part) for part in _list(each)] + [b"", b""]
                body += bytes([len(pair[0]) & 255]) + pair[0] + len(pair[1]).to_bytes(4, "big") + pair[1]
            found += frame(4, body, chance)
    for message in _list(talk.get("messages")):
        parts = [_bytes(part) for part in _list(message)]
        for number, part in enumerate(parts):
            found += frame(int(number < len(parts) - 1), part, chance)
    return greeting, found


def _list(data: Any) -> list[Any]:
    return data if isinstance(data, list) else []


def _bytes(data: Any) -> bytes:
    return data if isinstance(data, bytes) else data.encode(errors="replace") if isinstance(data, str) else b"\x07"


def _greeted(channel: socket.socket, seconds: float) -> bool:
    """Read the daemon's greeting, after which a client goes on; False: none comes."""
    data = b""
    while len(data) < 64:
        if not select.select([channel], [], [], seconds)[0] or not (part := channel.recv(64 - len(data))):
            return False
        data += part
    return True


@pytest.fixture
def daemon(daemon_home, tmp_path: Path) -> Iterator[tuple[psutil.Process, Path]]:
    """A daemon that watches itself, and the file for what it must not do."""
    told = tmp_path / "violations"
    roots = f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"
    command = [sys.executable, str(Path(__file__).parent / "watched_rannd.py"), str(told)]
    environment = {**daemon_home.environment(), "PYTHONPATH": roots}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        drained = subprocess.Popen(["cat"], stdin=running.stderr, stdout=subprocess.DEVNULL)
        yield psutil.Process(running.pid), told
        running.kill()
    drained.wait()


@pytest.mark.parametrize("batches", [BATCHES, pytest.param(20 * BATCHES, marks=pytest.mark.full)])
def test_conversations(batches: int, daemon: tuple[psutil.Process, Path]) -> None:
    process, told = daemon
    mutator, chance, slowest, sent, understood = Mutator(SEED + 9), random.Random(SEED), 0.0, 0, 0
    plain = [msgspec.msgpack.decode(protocol.encode(each)[-1]) for each in ASKED]
    before: tuple[int, int] | None = None
    for batch in range(batches):
        crowd = contextlib.ExitStack()
        for _ in range(SILENT):
            crowd.enter_context(socket.socket(socket.AF_UNIX)).connect(places().socket)
        for number in range(AT_ONCE):
            request = plain[(batch + number) % len(plain)]
            how = chance.random()
            try:
                body = msgspec.msgpack.encode(mutator.mutated(request) if how < 0.7 else request)
            except (OverflowError, RecursionError, UnicodeEncodeError, TypeError):
                continue
            talk: Any = {**CONVERSATION, "messages": [[b"", protocol.HEADER, body]]}
            greeting, rest = encoded(mutator.mutated(talk) if how > 0.5 else talk, chance)
            if chance.random() < 0.1:
                rest = rest[: chance.randrange(len(rest) + 1)]
            channel = crowd.enter_context(socket.socket(socket.AF_UNIX))
            channel.connect(places().socket)
            channel.settimeout(LONG_S)
            with contextlib.suppress(ConnectionError):
                channel.sendall(greeting)
                understood += _greeted(channel, 0.05)
                for begin in range(0, len(rest), step := chance.choice([7, 1 << 20])):
                    channel.sendall(rest[begin : begin + step])
            sent += 1
        begin = time.monotonic()
        key = keys.make_key("trace", {"number": batch})
        with connect(mode="on", timeout_s=LONG_S, idle_s=0, max_bytes=1 << 30) as client:
            assert client.put(key, b"%d" % batch)
            assert client.get(key) == b"%d" % batch
        slowest = max(slowest, time.monotonic() - begin)
        crowd.close()
        assert process.is_running(), "the daemon has ended"
        if before is None:
            before = process.memory_info().rss, process.num_fds()
    assert before is not None
    deadline = time.monotonic() + LONG_S
    while process.num_fds() > before[1] + 2 * (SILENT + AT_ONCE):
        assert time.monotonic() < deadline, "connections are not closed"
        time.sleep(0.05)
    grown = process.memory_info().rss - before[0]
    assert grown < GROWTH
    assert spawn.stop(places(), "the end of a test", time.monotonic() + LONG_S)
    process.wait(LONG_S)  # its last act is to write this
    assert told.read_text() == ""
    assert understood > sent / 2
    print(
        f"{sent} mutated conversations with the daemon, {batches * SILENT} silent ones; a client waits {slowest:.2f} s "
        f"at most; {grown >> 20} MiB more memory"
    )


def test_a_sound_conversation_is_understood(daemon: tuple[psutil.Process, Path]) -> None:
    """What is mutated is what a client sends: the daemon answers it."""
    body = msgspec.msgpack.encode({"t": "get", "keys": [KEY]})
    never = random.Random(0)
    never.random = lambda: 1.0  # type: ignore[method-assign]
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(places().socket)
        channel.settimeout(LONG_S)
        greeting, rest = encoded({**CONVERSATION, "messages": [[b"", protocol.HEADER, body]]}, never)
        channel.sendall(greeting)
        assert _greeted(channel, LONG_S)
        channel.sendall(rest)
        data = b""
        while b"values" not in data:
            part = channel.recv(1 << 16)
            assert part, data
            data += part
