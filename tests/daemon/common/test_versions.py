"""Versions of rannd side by side: neighbours understand each other, others part with a reason."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import zmq
from other_rannd import RUN, copy_of, run

from rannd.daemon.client import spawn
from rannd.daemon.client.cache import Lease, connect
from rannd.daemon.common import keys, protocol
from rannd.daemon.common.paths import places

NOW = f"PROTOCOL = {protocol.PROTOCOL}"


def protocol_version(number: int) -> dict[str, str]:
    return {NOW: f"PROTOCOL = {number}"}


CLIENT = """
from rannd.daemon.common import keys
from rannd.daemon.client.cache import Lease, connect
key = keys.make_key("trace", {"number": 1})
with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
    print(client.connected, client.put(key, b"x" * (2 << 20)), (client.get(key) or b"")[:3])
"""


def key(number: int) -> keys.Key:
    return keys.make_key("trace", {"number": number})


def pid_of_daemon(home) -> int:
    (pid,) = home.pids()
    return pid


@pytest.mark.parametrize("newer", [0, 1])
def test_a_client_one_version_older_is_served(daemon_home, tmp_path: Path, newer: int) -> None:
    """An older copy with this daemon, and this client with a newer copy."""
    copy = copy_of(tmp_path, protocol_version(protocol.PROTOCOL + (1 if newer else -1)))
    if newer:
        assert run(copy, RUN, "start").returncode == 0
        pid = pid_of_daemon(daemon_home)
        done = run({}, CLIENT)
    else:
        pid = spawn.ensure(idle_s=600, max_bytes=1 << 30, timeout_s=60).pid
        done = run(copy, CLIENT)
    assert (done.stdout, done.stderr) == ("True True b'xxx'\n", "")
    assert daemon_home.pids() == [pid]


def test_a_client_two_versions_older_is_refused_with_the_reason(daemon_home, tmp_path: Path) -> None:
    copy = copy_of(tmp_path, protocol_version(protocol.PROTOCOL + 2))
    assert run(copy, RUN, "start").returncode == 0
    pid = pid_of_daemon(daemon_home)
    done = run({}, "import logging; logging.basicConfig()\n" + CLIENT)
    assert done.stdout == "False False b''\n"
    assert done.stderr.count("WARNING") == 1
    assert f"the daemon has protocol version {protocol.PROTOCOL + 2}" in done.stderr
    assert "install one version of rannd in all environments" in done.stderr
    assert daemon_home.pids() == [pid], "the newer one stays"
    refused = run({}, RUN, "status")
    assert refused.returncode == 6
    assert "comes from an older rannd" in refused.stderr


@pytest.mark.parametrize("by", [1, 2])
def test_a_daemon_of_an_older_protocol_is_replaced_and_says_why(daemon_home, tmp_path: Path, by: int) -> None:
    copy = copy_of(tmp_path, protocol_version(protocol.PROTOCOL + by))
    old = spawn.ensure(idle_s=600, max_bytes=1 << 30, timeout_s=60).pid
    done = run(copy, CLIENT)
    assert (done.stdout, done.stderr) == ("True True b'xxx'\n", "")
    assert pid_of_daemon(daemon_home) != old
    log = Path(places().log).read_text()
    assert "ends: rannd " in log
    assert f"replaces one of protocol version {protocol.PROTOCOL}" in log


def test_an_older_daemon_that_comes_in_the_middle_of_a_job_is_replaced_too(
    daemon_home, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = copy_of(tmp_path, protocol_version(protocol.PROTOCOL - 1))
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
        assert client.put(key(1), b"x")
        daemon_home.end_daemons()
        assert run(older, RUN, "start").returncode == 0
        old = pid_of_daemon(daemon_home)
        assert client.get(key(1)) == b"x"
        assert client.connected
    assert pid_of_daemon(daemon_home) != old
    assert f"replaces one of protocol version {protocol.PROTOCOL - 1}" in Path(places().log).read_text()
    assert not caplog.records


# -- version 1, as it was ------------------------------------------------------------------------------------------


class Values1(msgspec.Struct, tag="values", tag_field="t", forbid_unknown_fields=True):
    values: list[bytes | None]


class Busy1(msgspec.Struct, tag="busy", tag_field="t", forbid_unknown_fields=True):
    pid: int
    since_s: float


class Lease1(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    pid: int
    since_s: float
    waiting: int


class State1(msgspec.Struct, tag="state", tag_field="t", forbid_unknown_fields=True):
    version: str
    protocol: int
    pid: int
    uptime_s: float
    idle_s: float
    requests: int
    rejected: int
    entries: int
    bytes: int
    max_bytes: int
    socket: str
    store: str
    log: str
    leases: list[Lease1]
    statistics: dict[str, int]


class Entry1(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    kind: str
    format: int
    rannd: str
    created: float
    used: float
    hits: int
    length: int
    checksum: str
    components: dict[str, str]


class Entries1(msgspec.Struct, tag="entries", tag_field="t", forbid_unknown_fields=True):
    entries: list[Entry1]
    more: bool


Reply1 = Values1 | Busy1 | State1 | Entries1


def ask1(request: dict[str, object]) -> Reply1:
    """A request and its reply in version 1, strictly."""
    with zmq.Context() as context, context.socket(zmq.REQ) as peer:
        peer.linger = 0
        peer.connect(f"ipc://{places().socket}")
        peer.send_multipart([b"rannd/1", msgspec.msgpack.encode(request)])
        assert peer.poll(60_000)
        header, content = peer.recv_multipart()
    assert header == b"rannd/1"
    return msgspec.msgpack.decode(content, type=Reply1)


def test_version_1_gets_what_it_knows(daemon_home) -> None:
    large = b"ab" * (1 << 20)
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
        client.put(key(1), large)
        lease = client.lease(key(2), 0, who="rank 0")
        assert ask1({"t": "get", "keys": [key(1).digest]}) == Values1([large]), "not compressed"
        listed = ask1({"t": "list"})
        assert isinstance(listed, Entries1)
        assert listed.entries[0].length < len(large), "but it is in the store"
        acquire = {"t": "acquire", "key": key(2).digest, "token": "0" * 32, "pid": os.getpid(), "wait_s": 0.0}
        assert isinstance(ask1(acquire), Busy1)
        state = ask1({"t": "status"})
        assert isinstance(state, State1)
        assert len(state.leases) == 1
        assert isinstance(lease, Lease)
        lease.release()


def test_a_put_of_version_1_is_found(daemon_home, caplog: pytest.LogCaptureFixture) -> None:
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client, caplog.at_level(logging.WARNING):
        entry = {"key": key(1).digest, "kind": "trace", "components": key(1).components, "value": b"old"}
        with zmq.Context() as context, context.socket(zmq.REQ) as peer:
            peer.connect(f"ipc://{places().socket}")
            peer.send_multipart(
                [b"rannd/1", msgspec.msgpack.encode({"t": "put", "version": "0.0", "entries": [entry]})]
            )
            assert peer.recv_multipart()[0] == b"rannd/1"
        assert client.get(key(1)) == b"old"
    assert not caplog.records


def test_an_older_daemon_that_dies_while_it_is_replaced_is_no_hindrance(daemon_home) -> None:
    """It answers two greetings, in its own version, and is gone when it is asked to stop."""
    places().secure_runtime()
    context = zmq.Context()
    old = context.socket(zmq.ROUTER)
    old.bind(f"ipc://{places().socket}")

    def serve() -> None:
        for _ in range(2):
            route, *_ = old.recv_multipart()
            old.send_multipart([route, b"", b"rannd/1", msgspec.msgpack.encode(protocol.Failed("version", "old"))])
        old.recv_multipart()
        old.close(0)
        context.term()
        Path(places().socket).unlink(missing_ok=True)

    serving = threading.Thread(target=serve)
    serving.start()
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
        assert client.put(key(1), b"x")
    serving.join()


ACTIVATED = "import os; os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); os.dup2(%d, 3); " + RUN


@pytest.mark.parametrize("old", ["protocol", "release"])
def test_an_older_daemon_that_systemd_starts_again_and_again(
    daemon_home, tmp_path: Path, caplog: pytest.LogCaptureFixture, old: str
) -> None:
    """It is stopped a few times, then used where it speaks this version of the protocol, or the cure is told."""
    changes = {
        "protocol": protocol_version(protocol.PROTOCOL - 1),
        "release": {"    return __version__": '    return "0.0.1"'},
    }
    copy = copy_of(tmp_path, changes[old])
    places().secure_runtime()
    starts: list[subprocess.Popen[bytes]] = []
    ended = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(places().socket)
        listener.listen(100)
        program = [sys.executable, "-c", ACTIVATED % listener.fileno(), "run"]

        def systemd() -> None:
            while not ended.is_set():
                if select.select([listener], [], [], 0.05)[0]:
                    starts.append(
                        subprocess.Popen(
                            program,
                            env={**os.environ, **copy},
                            pass_fds=(listener.fileno(),),
                            cwd="/",
                            stderr=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                        )
                    )
                    starts[-1].wait()

        starting = threading.Thread(target=systemd)
        starting.start()
        try:
            with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
                assert client.connected == (old == "release")
            told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            assert len(starts) <= spawn.MOST_REPLACED + 2
        finally:
            ended.set()
            for each in starts:
                each.terminate()
            starting.join()
    assert len(told) == (old == "protocol")
    assert all("rannd install-service --force" in each for each in told)
