"""The command that tells elastic jobs that a host goes away."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from rannd.runner.elastic import notify_preempt
from rannd.runner.run import main
from rannd.runner.watch import notice_socket
from rannd.runner.watch.notice_socket import Notice, Noticed, NoticeSocket


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that no job of this machine has."""
    monkeypatch.setattr(notice_socket, "PREFIX", f"test-preempt-{os.getpid()}")


class Jobs:
    """Elastic jobs, each with its answer, and the notices that they got."""

    def __init__(self) -> None:
        self.heard: list[Notice] = []
        self._answering: list[threading.Thread] = []
        self._over = threading.Event()

    def add(self, answer: Noticed) -> None:
        listening = NoticeSocket()
        self._answering.append(threading.Thread(target=self._serve, args=(listening, answer)))
        self._answering[-1].start()

    def end(self) -> None:
        self._over.set()
        for each in self._answering:
            each.join()

    def _serve(self, listening: NoticeSocket, answer: Noticed) -> None:
        while not self._over.wait(0.01):
            for notice in listening.hear():
                self.heard.append(notice)
                listening.answer(answer)
        listening.close()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    made = Jobs()
    yield made
    made.end()


def _told(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["notify-preempt", *arguments])


def test_without_a_job_it_is_an_error() -> None:
    result = _told("c")
    assert result.exit_code == 7
    assert "no elastic job of this user runs on this machine" in result.stderr


def test_every_job_answers_on_a_line(jobs: Jobs) -> None:
    jobs.add(Noticed(True, "the ranks save and end in 10 s"))
    jobs.add(Noticed(False, "c is not one of the hosts of this job: a, b"))
    result = _told("c", "--in", "30")
    assert result.exit_code == 0
    assert sorted(result.stdout.splitlines()) == [
        "c is not one of the hosts of this job: a, b",
        "the ranks save and end in 10 s",
    ]
    assert jobs.heard == [Notice("c", 30.0)] * 2


def test_a_notice_that_no_job_takes_is_an_error(jobs: Jobs) -> None:
    jobs.add(Noticed(False, "c is not one of the hosts of this job: a, \udcff"))
    result = _told("c")
    assert result.exit_code == 7
    assert result.stderr == "rannc-run: c is not one of the hosts of this job: a, \\udcff\n"


@pytest.mark.parametrize("host", [[], ["localhost"], [os.uname().nodename]])
def test_this_machine_is_told_as_the_one_where_the_notice_is_given(jobs: Jobs, host: list[str]) -> None:
    """Jobs may know it by another name."""
    jobs.add(Noticed(True, "yes"))
    assert _told(*host).exit_code == 0
    assert jobs.heard == [Notice("", 120.0)]


def test_a_job_that_does_not_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify_preempt, "ANSWER_S", 0.2)
    listening = NoticeSocket()
    result = _told("c")
    listening.close()
    assert result.exit_code == 7
    assert "a job has not answered within 0.2 s; it takes the notice when it can" in result.stderr


@pytest.mark.parametrize("said", [b"", b"x" * 9, b"A\0\0\0\2[]", b'A\0\0\0\x0e{"taken": true}'[:18]])
def test_what_answers_nonsense_is_told(said: bytes) -> None:
    def serve() -> None:
        channel, _ = listener.accept()
        with channel:
            channel.recv(100)
            channel.sendall(said)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{notice_socket.own_prefix()}1-1")
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        result = _told("c")
        thread.join()
    assert result.exit_code == 7
    assert "a job has not answered: " in result.stderr


@pytest.mark.parametrize("arguments", [["--in", "-1"], ["--in", "nan"], ["--in", "soon"], ["a", "b"], ["--out", "3"]])
def test_wrong_arguments_are_told_and_reach_no_job(jobs: Jobs, arguments: list[str]) -> None:
    jobs.add(Noticed(True, "yes"))
    result = _told(*arguments)
    assert result.exit_code == 2
    assert jobs.heard == []


def test_a_script_of_this_name_needs_a_path() -> None:
    result = CliRunner().invoke(main, ["--dry-run", "notify-preempt"])
    assert "there is no script notify-preempt" in result.stderr
    assert "rannc-run notify-preempt" in CliRunner().invoke(main, ["--help"]).stdout
    assert "Usage: main notify-preempt [OPTIONS] [HOST]" in _told("--help").stdout
