"""The daemon answers whatever comes, and goes away only when nobody needs it."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import zmq
from asking import state

from rannd.daemon.client import spawn
from rannd.daemon.client.cache import Client, Lease, connect
from rannd.daemon.common import file_locks, keys, protocol
from rannd.daemon.common.paths import places
from rannd.daemon.server import boot, holders
from rannd.daemon.server.server import Settings


def key(number: int) -> keys.Key:
    return keys.make_key("trace", {"number": number})


@pytest.fixture
def client(daemon_home) -> Iterator[Client]:
    with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as connected:
        assert connected.connected
        yield connected


def raw_reply(frames: list[bytes]) -> protocol.Reply:
    with zmq.Context() as context, context.socket(zmq.REQ) as peer:
        peer.linger = 0
        peer.connect(f"ipc://{places().socket}")
        peer.send_multipart(frames)
        assert peer.poll(60_000)
        return protocol.decode_reply(peer.recv_multipart())


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"hello"],
        [b"rannd/0", b""],
        [b"rannd/two", b""],
        [protocol.HEADER],
        [protocol.HEADER, b"\xc1"],
        [protocol.HEADER, b"\x82\xa1t\xa4stop\xa6reason\xa2\xff\xfe"],
        [protocol.HEADER, os.urandom(1000)],
        [protocol.HEADER, msgspec.msgpack.encode({"t": "get", "keys": ["x"]})],
        [protocol.HEADER, msgspec.msgpack.encode({"t": "values", "values": []})],
        [protocol.HEADER, msgspec.msgpack.encode({"t": "put", "version": "1", "entries": [1]})],
        [protocol.HEADER, b"\x91" * 100_000],
        [protocol.HEADER, b"", b"", b""],
    ],
)
def test_garbage_gets_an_error_and_the_daemon_lives_on(client: Client, frames: list[bytes]) -> None:
    reply = raw_reply(frames)
    assert isinstance(reply, protocol.Failed)
    assert reply.code == "protocol"
    assert state().rejected == 1
    assert client.put(key(1), b"x")


def test_kinds_that_do_not_go_with_the_keys_lose_no_value(client: Client) -> None:
    client.put_many([(key(1), b"x"), (key(2), b"y")])
    reply = raw_reply(protocol.encode(protocol.Get([key(1).digest, key(2).digest], ["trace"])))
    assert isinstance(reply, protocol.Values)
    assert reply.values == [b"x", b"y"]


def test_bytes_that_are_not_zeromq_are_dropped(client: Client) -> None:
    peers = []
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000, os.urandom(5000)):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(places().socket)
        peer.send(garbage)
        peers.append(peer)
    assert client.put(key(1), b"x")
    for peer in peers:
        peer.close()
    assert client.get(key(1)) == b"x"


def test_messages_without_a_return_address_are_dropped(client: Client) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.connect(f"ipc://{places().socket}")
        peer.send(b"no delimiter")
        peer.send_multipart([b"", *protocol.encode(protocol.Status())])
        assert peer.poll(60_000)
        reply = protocol.decode_reply(peer.recv_multipart()[1:])
    assert isinstance(reply, protocol.State)
    assert reply.rejected == 1


def test_an_oversized_message_ends_its_connection_only(client: Client) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as peer:
        peer.linger = 0
        with peer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            peer.connect(f"ipc://{places().socket}")
            peer.send_multipart([protocol.HEADER, bytes(protocol.MAX_MESSAGE + 1)])
            assert monitor.poll(60_000), "libzmq hangs up"
            peer.disable_monitor()
    assert client.put(key(1), b"x")


def test_an_entry_whose_key_is_not_its_own_is_refused(client: Client) -> None:
    entry = protocol.NewEntry(key(1).digest, "trace", key(2).components, b"x")
    reply = raw_reply(protocol.encode(protocol.Put("1", [entry])))
    assert isinstance(reply, protocol.Failed)
    assert client.get(key(1)) is None


def test_a_key_that_is_too_large_is_not_compared(client: Client) -> None:
    """All other clients would wait for seconds."""
    large = {f"component {number}": "x" * 10_000 for number in range(200)}
    reply = raw_reply(protocol.encode(protocol.Why("trace", large)))
    assert isinstance(reply, protocol.Failed)
    assert "at most 1,048,576 characters" in reply.text
    assert client.why(keys.Key("trace", key(1).digest, large)) == ("", "its key is too large to be compared")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_gets_no_answer(client: Client, daemon_home) -> None:
    """The directory keeps others out already; the socket checks the peer's uid on its own."""
    script = (
        "import os, sys, zmq; from rannd.daemon.common import protocol\n"
        "os.setuid(65534)\n"
        "peer = zmq.Context().socket(zmq.REQ); peer.linger = 0\n"
        "monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)\n"
        "peer.connect('ipc://' + sys.argv[1])\n"
        "peer.send_multipart(protocol.encode(protocol.Status()))\n"
        "poller = zmq.Poller(); poller.register(peer, zmq.POLLIN); poller.register(monitor, zmq.POLLIN)\n"
        "print([name is peer for name, _ in poller.poll(60000)], flush=True)\n"
        "os._exit(0)\n"
    )
    for directory in (daemon_home.base, daemon_home.runtime, daemon_home.runtime / "rannd"):
        directory.chmod(0o711)
    Path(places().socket).chmod(0o666)
    asked = subprocess.run(
        [sys.executable, "-c", script, places().socket], stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    (daemon_home.runtime / "rannd").chmod(0o700)
    assert asked.stdout == "[False]\n"
    assert state().requests == 2, "the greeting and this one"


def test_many_clients_at_once(client: Client) -> None:
    values = {number: os.urandom(random.Random(number).randrange(50_000)) for number in range(64)}

    def work(number: int) -> bool:
        with connect(mode="on", timeout_s=120, idle_s=600, max_bytes=1 << 30) as mine:
            sound = mine.put(key(number), values[number])
            for other in range(64):
                sound = sound and mine.get(key(other)) in (None, values[other])
            return sound and mine.get(key(number)) == values[number]

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(work, values))
    assert client.get_many([key(number) for number in values]) == list(values.values())


CLIENT = """
import sys
from rannd.daemon.common import keys
from rannd.daemon.client.cache import connect
mine = int(sys.argv[1])
with connect(mode="on", timeout_s=120, idle_s=600, max_bytes=1 << 30) as client:
    for number in range(20):
        key = keys.make_key("trace", {"mine": mine, "number": number})
        assert client.get(key) is None
        assert client.put(key, b"%d %d" % (mine, number))
        assert client.get(key) == b"%d %d" % (mine, number)
    assert client.connected
"""


def test_16_processes_at_once(daemon_home) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", CLIENT, str(mine)]) for mine in range(16)]
    assert [worker.wait() for worker in workers] == [0] * 16
    assert len(daemon_home.pids()) == 1
    assert state().entries == 16 * 20


def test_descriptors_do_not_leak(client: Client) -> None:
    client.put(key(1), b"x")

    def count() -> int:
        state()  # the answer comes after what went before it has been cleaned up
        return len(os.listdir(f"/proc/{state().pid}/fd"))

    before = count()
    for number in range(200):
        client.get(key(number))
        lease = client.lease(key(1000 + number), 0)
        assert isinstance(lease, Lease)
        lease.release()
    # libzmq closes a connection in its own thread, a moment after its peer.
    deadline = time.monotonic() + 60
    while (after := count()) > before + 5 and time.monotonic() < deadline:
        select.select([], [], [], 0.01)
    assert after <= before + 5


def test_at_its_limit_it_serves_who_is_there_and_refuses_others(daemon_home) -> None:
    """libzmq aborts the process when it accepts a client without a descriptor for it."""
    few = 160
    rannd = [sys.executable, "-c", "from rannd.daemon.cli import main; main()", "run"]
    limited = ["prlimit", f"--nofile={few}:{few}", *rannd]
    with (
        subprocess.Popen(limited, stdout=subprocess.PIPE, text=True) as daemon,
        contextlib.ExitStack() as ending,
        contextlib.ExitStack() as crowd,
    ):
        ending.callback(daemon.terminate)
        assert daemon.stdout is not None
        daemon.stdout.readline()
        with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as one:
            assert one.put(key(1), b"x")
            for _ in range(2 * few):
                other = crowd.enter_context(socket.socket(socket.AF_UNIX))
                other.connect(places().socket)
                assert one.get(key(1)) == b"x"  # a turn of the daemon
            late = connect(mode="on", timeout_s=0.5, idle_s=600, max_bytes=1 << 30)
            assert not late.connected
            lease = one.lease(key(2), 0)
            assert isinstance(lease, Lease)  # it ends without a beat; watching its holder would take of what is kept
            assert "anon_inode:[pidfd]" not in [os.readlink(fd) for fd in Path(f"/proc/{daemon.pid}/fd").iterdir()]
            lease.release()
            crowd.close()
            with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as next_one:
                assert next_one.get(key(1)) == b"x"
            (trouble,) = [each.text for each in state().errors if "descriptors" in each.text]
            assert trouble.startswith("new clients are refused: of the 160 file descriptors ")
            assert one.get(key(1)) == b"x"
        assert daemon.poll() is None


QUICK = """
from rannd.daemon.server import server
server.CHECK_S = 0.05
from rannd.daemon.cli import main
main()
"""


def test_lock_files_that_were_deleted_are_made_again(daemon_home) -> None:
    """As a cleaner of /tmp does: `rannd stop` found no daemon, and `rannd run` took the socket of the running one."""
    rannd = [sys.executable, "-c", QUICK, "run"]
    with subprocess.Popen(rannd, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as one:
            assert one.put(key(1), b"x")
            for name in (places().life, places().use, places().spawn):
                Path(name).unlink(missing_ok=True)
            assert not boot.run(places(), Settings(600, 1 << 30, "9"))  # another one, before the check
            while not (boot.lives(places()) and Path(places().use).exists()):
                select.select([], [], [], 0.01)
            assert Path(places().life).read_text() == f"{daemon.pid}\n"
            assert one.get(key(1)) == b"x"
            assert state().pid == daemon.pid
        assert spawn.stop(places(), "test", time.monotonic() + 60)
        assert daemon.wait() == 0


def test_it_ends_where_another_has_the_lock_that_was_deleted(daemon_home) -> None:
    rannd = [sys.executable, "-c", QUICK, "run"]
    with subprocess.Popen(rannd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30):
            taken = places().life + ".new"
            with file_locks.held(taken, time.monotonic() + 60):
                os.replace(taken, places().life)
                assert daemon.wait() == 0
        assert daemon.stderr is not None
        assert "was removed, and another daemon holds the new one" in daemon.stderr.read()


def test_without_descriptors_it_does_not_start(daemon_home) -> None:
    rannd = [sys.executable, "-c", "from rannd.daemon.cli import main; main()", "run"]
    done = subprocess.run(["prlimit", "--nofile=60:60", *rannd], capture_output=True, text=True, check=False)
    assert done.returncode == 6
    assert "the daemon needs 80 file descriptors, and " in done.stderr


def test_acknowledged_puts_survive_kill_9(daemon_home) -> None:
    for round_ in range(10):
        with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
            for number in range(5):
                assert client.put(key(round_ * 5 + number), bytes([round_]) * 30_000)
            (pid,) = daemon_home.pids()
            os.kill(pid, signal.SIGKILL)  # at once: nothing but the acknowledgement has happened since
            expected = [bytes([number // 5]) * 30_000 for number in range(5 * (round_ + 1))]
            assert client.get_many([key(number) for number in range(5 * (round_ + 1))]) == expected
            assert client.connected


def test_an_idle_exit_loses_no_request(daemon_home) -> None:
    """A daemon that leaves after 2 ms without work, against clients that pause about as long."""

    def work(seed: int) -> int:
        pauses = random.Random(seed)
        with connect(mode="on", timeout_s=120, idle_s=0.002, max_bytes=1 << 30) as client:
            answered = 0
            for number in range(60):
                assert client.put(key(seed * 1000 + number), b"x")
                select.select([], [], [], pauses.random() * 0.02)
                answered += client.get(key(seed * 1000 + number)) == b"x"
            assert client.connected
            return answered

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [60] * 3
    starts = Path(places().log).read_text().count("listens at")
    assert starts > 3, "the daemon did leave in between"


def test_a_lease_keeps_an_idle_daemon(daemon_home) -> None:
    client = connect(mode="on", timeout_s=60, idle_s=0.01, max_bytes=1 << 30)
    lease = client.lease(key(1), 0)
    assert isinstance(lease, Lease)
    (pid,) = daemon_home.pids()
    watch = os.pidfd_open(pid)
    assert not select.select([watch], [], [], 0.5)[0], "it stays while something is leased"
    lease.release()
    assert select.select([watch], [], [], 60)[0], "and leaves afterwards"
    os.close(watch)


def test_who_is_asking_keeps_an_idle_daemon(daemon_home) -> None:
    where = places()
    where.secure_runtime()
    with file_locks.held(where.use, time.monotonic() + 60, shared=True):
        connect(mode="on", timeout_s=60, idle_s=0.01, max_bytes=1 << 30)
        (pid,) = daemon_home.pids()
        watch = os.pidfd_open(pid)
        assert not select.select([watch], [], [], 0.5)[0]
    assert select.select([watch], [], [], 60)[0]
    os.close(watch)


def test_who_only_looks_keeps_no_daemon(daemon_home) -> None:
    """A monitoring system would keep it for ever."""
    connect(mode="on", timeout_s=60, idle_s=0.5, max_bytes=1 << 30)
    (pid,) = daemon_home.pids()
    watch = os.pidfd_open(pid)
    deadline = time.monotonic() + 60
    asked = 0
    with zmq.Context() as context, context.socket(zmq.REQ) as peer:
        peer.linger = 0
        peer.connect(f"ipc://{places().socket}")
        while not select.select([watch], [], [], 0.05)[0]:
            assert time.monotonic() < deadline
            if asked == 0 or peer.poll(0):
                if asked:
                    peer.recv_multipart()
                peer.send_multipart(protocol.encode(protocol.Status()))
                asked += 1
    os.close(watch)
    assert asked > 2


def test_limits_follow_the_latest_client(client: Client) -> None:
    assert state().max_bytes == 1 << 30
    connect(mode="on", timeout_s=60, idle_s=300, max_bytes=5000)
    assert (state().idle_s, state().max_bytes) == (300, 5000)
    for number in range(10):
        assert client.put(key(number), bytes(1000))
    assert state().bytes <= 5000


def test_a_stop_answers_what_is_queued(client: Client) -> None:
    """Requests sent over standing connections before the stop are answered; who comes later starts another daemon."""
    context = zmq.Context.instance()  # that of `stop`: its thread sends first what was given to it first
    peers = [context.socket(zmq.REQ) for _ in range(20)]
    for peer in peers:
        peer.linger = 0
        peer.connect(f"ipc://{places().socket}")
        peer.send_multipart(protocol.encode(protocol.Status()))
    for peer in peers:
        assert peer.poll(60_000)
        peer.recv_multipart()
    for peer in peers:
        peer.send_multipart(protocol.encode(protocol.Status()))
    assert spawn.stop(places(), "test", time.monotonic() + 60)
    for peer in peers:
        assert peer.poll(60_000)
        assert isinstance(protocol.decode_reply(peer.recv_multipart()), protocol.State)
        peer.close()
    assert client.put(key(1), b"x")


HOLDER = """
import sys
from rannd.daemon.common import keys
from rannd.daemon.client.cache import connect
cache = connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)
print(cache.connected, flush=True)
cache.lease(keys.make_key("trace", {"number": 1}), 60)
print("has it", flush=True)
sys.stdin.readline()
"""


def test_a_holder_and_who_waits_for_it_die_at_the_same_time(client: Client, daemon_home) -> None:
    """As when a batch system ends two jobs while the daemon is busy: all of it is seen in one turn."""
    (daemon,) = daemon_home.pids()
    started = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    deadline = time.monotonic() + 60
    while not [lease for lease in state().leases if lease.waiting]:
        assert time.monotonic() < deadline
        select.select([], [], [], 0.01)
    os.kill(daemon, signal.SIGSTOP)
    for each in started:
        each.kill()
        each.communicate()
    os.kill(daemon, signal.SIGCONT)
    while state().leases:
        assert time.monotonic() < deadline
    assert daemon_home.pids() == [daemon]


@pytest.mark.parametrize("path", ["/dev/null", "/"])
def test_a_descriptor_that_is_another_files_by_now_names_nobody(path: str) -> None:
    """The client has gone before its message is read, and the daemon has opened something else meanwhile."""
    fd = os.open(path, os.O_RDONLY)

    class Frame:
        def get(self, option: int) -> int:
            return fd

    before = len(os.listdir("/proc/self/fd"))
    assert holders.peer_pid(Frame()) == 0  # type: ignore[arg-type]
    assert len(os.listdir("/proc/self/fd")) <= before, "fewer where zmq closes what an earlier test had"
    os.close(fd)


def test_who_never_ceases_to_ask_does_not_keep_it_from_its_end(client: Client, daemon_home) -> None:
    ended = threading.Event()

    def ask() -> None:
        request = [b"", *protocol.encode(protocol.Get([key(number).digest for number in range(200)]))]
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.sndtimeo = 100
            peer.connect(f"ipc://{places().socket}")
            while not ended.is_set():
                with contextlib.suppress(zmq.Again):
                    peer.send_multipart(request)
                while peer.poll(0):
                    peer.recv_multipart()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        while state().requests < 100:
            pass
        assert spawn.stop(places(), "a test", time.monotonic() + 30)
    finally:
        ended.set()
        asking.join()
