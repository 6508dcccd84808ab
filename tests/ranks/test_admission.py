"""Who is admitted by a process that listens, and what strangers can do to it: nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from rannd.ranks import admission
from rannd.ranks.admission import NotAdmittedError, Reception, admitted, introduce, new_token

TOKEN = new_token()


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def reception(told: list[str]) -> Iterator[Reception]:
    found = Reception(socket.create_server(("127.0.0.1", 0)), TOKEN, told.append)
    yield found
    found.close()


def knock(reception: Reception) -> socket.socket:
    return socket.create_connection(reception.listener.getsockname(), timeout=30)


def admit_until(reception: Reception, *, admitted: int = 0, strangers: int | None = None) -> list[socket.socket]:
    """Those admitted until there are so many, and so many strangers."""
    found: list[socket.socket] = []
    while len(found) < admitted or (strangers is not None and reception.waiting != strangers):
        due = reception.due()
        select.select([reception], [], [], due)
        found += reception.admit()
    return found


def introduced(reception: Reception, token: str = TOKEN) -> tuple[threading.Thread, list[OSError], socket.socket]:
    """A process that introduces itself: its thread, its errors, its socket."""
    channel, errors = knock(reception), []

    def run() -> None:
        try:
            introduce(channel, token)
            channel.sendall(b"after")
        except OSError as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors, channel


def test_who_knows_the_token_is_admitted_and_nothing_after_the_answer_is_read(reception: Reception) -> None:
    thread, errors, channel = introduced(reception)
    (end,) = admit_until(reception, admitted=1)
    thread.join()
    assert not errors
    assert channel.gettimeout() == 30
    end.setblocking(True)
    assert end.recv(100) == b"after"
    assert reception.waiting == 0
    end.close()
    channel.close()


def test_another_token_is_refused(reception: Reception) -> None:
    thread, errors, channel = introduced(reception, new_token())
    admit_until(reception, strangers=1)
    assert admit_until(reception, strangers=0) == []
    thread.join()
    assert isinstance(errors[0], NotAdmittedError)
    channel.close()


def test_a_listener_that_does_not_know_the_token_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        channel = socket.create_connection(other.getsockname())
        theirs, _ = other.accept()
        theirs.sendall(bytes(32) + bytes(32))
        with pytest.raises(NotAdmittedError, match="does not know this job's token"):
            introduce(channel, TOKEN)
        assert TOKEN.encode() not in theirs.recv(1000)
        channel.close()
        theirs.close()


def test_a_listener_that_answers_bit_by_bit_is_not_waited_for_any_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TURN_S", 0.5)
    gave_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other:
        channel = socket.create_connection(other.getsockname())
        theirs, _ = other.accept()

        def drip() -> None:
            for _ in range(64):
                if gave_up.wait(0.05):
                    return
                theirs.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError):
            introduce(channel, TOKEN)
        gave_up.set()
        thread.join()
        channel.close()
        theirs.close()


def test_an_answer_to_another_nonce_is_refused(reception: Reception) -> None:
    thread, _, channel = introduced(reception)
    with socket.create_server(("127.0.0.1", 0)) as between:
        # Who sits between them sees all that is sent.
        first = knock(reception)
        admit_until(reception, admitted=1)[0].close()
        thread.join()
        nonce = first.recv(32)
        victim = socket.create_connection(between.getsockname())
        theirs, _ = between.accept()
        theirs.sendall(nonce[::-1])

        def run() -> None:
            with pytest.raises(NotAdmittedError):
                introduce(victim, TOKEN)

        thread = threading.Thread(target=run)
        thread.start()
        first.sendall(theirs.recv(64))
        theirs.close()
        assert admit_until(reception, strangers=0) == []
        thread.join()
    for each in (first, victim, channel):
        each.close()


@pytest.mark.parametrize("sent", [b"", b"x", b"\xff" * 64, b"[" * 200_000], ids=["nothing", "a byte", "64", "200,000"])
def test_strangers_are_closed_when_their_time_is_over_or_their_answer_wrong(
    reception: Reception, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "ANSWER_S", 0.2)
    with knock(reception) as stranger:
        stranger.sendall(sent)
        admit_until(reception, strangers=1)
        assert admit_until(reception, strangers=0) == []
    assert reception.due() is None


def test_few_strangers_wait_at_once_and_others_have_their_turn(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_STRANGERS", 3)
    monkeypatch.setattr(admission, "ANSWER_S", 0.2)
    silent = [knock(reception) for _ in range(7)]
    thread, errors, channel = introduced(reception)
    most, admitted = 0, []
    while not admitted:
        select.select([reception], [], [], reception.due())
        admitted = reception.admit()
        most = max(most, reception.waiting)
    thread.join()
    assert (most, errors) == (3, [])
    for each in (*silent, channel, *admitted):
        each.close()


@contextlib.contextmanager
def served(reception: Reception, *beside: Callable[[], None]) -> Iterator[list[socket.socket]]:
    """Those whom a process admits in a thread of its own; in others, something is done again and again."""
    stop, found = threading.Event(), list[socket.socket]()

    def admit() -> None:
        select.select([reception], [], [], min(reception.due() or 0.1, 0.1))
        found.extend(reception.admit())

    def again(what: Callable[[], None]) -> None:
        while not stop.is_set():
            what()

    threads = [threading.Thread(target=again, args=(what,)) for what in (admit, *beside)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for each in found:
            each.close()


def test_strangers_that_come_again_and_again_do_not_keep_others_waiting(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MOST_STRANGERS", 3)
    monkeypatch.setattr(admission, "PATIENCE_S", 0.05)
    monkeypatch.setattr(admission, "TURN_S", 20.0)
    silent = [knock(reception) for _ in range(30)]

    def refill() -> None:
        for gone in select.select(silent, [], [], 0.02)[0]:
            if not gone.recv(100):
                gone.close()
                silent[silent.index(gone)] = knock(reception)

    with served(reception, refill):
        silent.append(admitted(lambda: knock(reception), TOKEN))
    for each in silent:
        each.close()


def test_who_was_too_slow_among_strangers_comes_again(reception: Reception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_STRANGERS", 1)
    monkeypatch.setattr(admission, "PATIENCE_S", 0.05)
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        opened.append(knock(reception))
        if len(opened) == 1:
            opened.append(knock(reception))
            assert select.select([opened[1]], [], [], 30)[0], "it has the place of the first one"
        return opened[0] if len(opened) == 2 else opened[-1]

    with served(reception):
        assert admitted(connect, TOKEN) is opened[2]
    for each in opened:
        each.close()


def test_another_token_is_not_tried_again(reception: Reception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PATIENCE_S", 60.0)  # it is refused before that
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        opened.append(knock(reception))
        return opened[-1]

    with served(reception) as found, pytest.raises(NotAdmittedError):
        admitted(connect, new_token())
    assert (len(opened), found) == (1, [])


class Failing(socket.socket):
    """A listener whose accept fails, so often."""

    code = errno.ECONNABORTED
    times = 1

    def accept(self) -> tuple[socket.socket, object]:
        if self.times:
            self.times -= 1
            raise OSError(self.code, os.strerror(self.code))
        return super().accept()


@pytest.mark.parametrize("code", [errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EMFILE, errno.ENOBUFS])
def test_an_error_of_accept_ends_nothing(code: int, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "PAUSE_S", 0.1)
    listener = Failing()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.code, listener.times = code, 2
    reception = Reception(listener, TOKEN, told.append)
    thread, errors, channel = introduced(reception)
    (end,) = admit_until(reception, admitted=1)
    thread.join()
    assert errors == []
    own = code in (errno.EMFILE, errno.ENOBUFS)
    assert told == ([f"a connection cannot be accepted: {os.strerror(code)}; trying again each 0.1 s"] if own else [])
    for each in (end, channel, reception):
        each.close()


class Besieged(socket.socket):
    """A listener in whose queue there is always a peer that has gone already."""

    accepted = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.accepted += 1
        assert self.accepted <= 1000, "it does not come back"
        with socket.socket(socket.AF_UNIX) as passing:
            passing.connect(self.getsockname())
        return super().accept()


def test_a_flood_of_peers_that_have_gone_does_not_keep_it() -> None:
    listener = Besieged(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    reception = Reception(listener, TOKEN, pytest.fail)
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(listener.getsockname())
    assert reception.admit() == []
    assert listener.accepted <= admission.MOST_STRANGERS
    reception.close()


def test_without_free_files_it_does_not_spin(told: list[str]) -> None:
    listener = Failing()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.code, listener.times = errno.EMFILE, 1 << 30
    reception = Reception(listener, TOKEN, told.append)
    with knock(reception):
        select.select([reception], [], [])
        assert reception.admit() == []
        assert select.select([reception], [], [], 0.0)[0] == []
        due = reception.due()
        assert due is not None
        assert 0 < due <= admission.PAUSE_S
    reception.close()


SOMEBODY_ELSE = """
import os, socket, sys
os.setuid(65534)
channel = socket.socket(socket.AF_UNIX)
channel.connect("\\0" + sys.argv[1])
print("connected", flush=True)
print(len(channel.recv(100)))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_of_the_machine_takes_no_place() -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    reception = Reception(listener, TOKEN, pytest.fail)
    command = [sys.executable, "-I", "-S", "-c", SOMEBODY_ELSE, listener.getsockname()[1:].decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "connected\n"
        assert reception.admit() == []
        assert reception.waiting == 0
        assert other.stdout.read() == "0\n", "it is closed, and gets not even a nonce"
    reception.close()


def test_closing_it_turns_strangers_away(reception: Reception) -> None:
    place = reception.listener.getsockname()
    with knock(reception) as stranger:
        admit_until(reception, strangers=1)
        reception.close()
        assert len(stranger.recv(100)) == 32
        assert stranger.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place)
