"""What becomes of a job when it is told that a host goes away."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rannd.runner.elastic import host_file, preemption
from rannd.runner.elastic.host_errand import History, HostErrand
from rannd.runner.elastic.host_file import HostFile
from rannd.runner.elastic.members import Members
from rannd.runner.elastic.patience import Patience
from rannd.runner.elastic.preemption import LEAD_S, NoticeErrand, Preemptions
from rannd.runner.elastic.restarts import Restarts
from rannd.runner.elastic.slow_hosts import SlowHosts
from rannd.runner.resources.host_list import Host, place
from rannd.runner.watch import notice_socket
from rannd.runner.watch.notice_socket import Notice, Noticed

A, B, C = Host("a", 1), Host("b", 1), Host("c.cluster", 2)
LEAVE_S, GRACE_S = 30.0, 5.0
LONG_S = 60.0


class Fixture:
    """A job on hosts of a file, and what it was asked and said."""

    def __init__(self, path: Path, least: int = 1, most: int = 0, *, file: bool = True) -> None:
        self.said: list[str] = []
        self.left: list[float] = []
        self.path = path
        self.members = Members(least, most)
        self.file: HostFile | None = None
        if file:
            path.write_text("a\nb\nc.cluster slots=2")
            self.file = HostFile(path, self.said.append)
            self.members.name(self.file.hosts)
        self.notices = Preemptions(self.members, file, LEAVE_S, GRACE_S, self.said.append)

    def start(self, *hosts: Host) -> NoticeErrand:
        """Ranks run on hosts."""
        slow = SlowHosts(Path("/nowhere"), self.members, False, self.said.append)
        history = History(Restarts(10), Patience(), slow)
        errand = HostErrand(self.file, self.members, hosts, LEAVE_S, GRACE_S, history, self.said.append)
        places = place(sum(host.slots for host in hosts), hosts)
        return self.notices.beside(errand, hosts if self.file is not None else [], places)

    def run(self, start: NoticeErrand) -> None:
        """Let the monitor have its turn."""
        start.run(self.left.append)

    def name(self, text: str, start: NoticeErrand) -> None:
        """Change the host file, and give the job time to see it."""
        self.path.write_text(text)
        for _ in range(3):
            time.sleep(max(0.0, start.due() - time.monotonic()))
            self.run(start)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "SETTLE_S", 0.05)
    monkeypatch.setattr(notice_socket, "PREFIX", f"test-preemption-{os.getpid()}")


@pytest.fixture
def made(tmp_path: Path) -> Fixture:
    return Fixture(tmp_path / "hosts")


def test_ranks_train_on_until_shortly_before_their_host_goes(made: Fixture) -> None:
    start = made.start(A, B, C)
    answer = made.notices.take(Notice("b", LEAD_S + 100), "")
    then = "and go on without b, as 3 ranks on a:1, c.cluster:2"
    assert answer == Noticed(True, f"the ranks save and end in 100 s, {then}")
    assert made.said == [f"notice: b goes in 120 s: {answer.text}"]
    made.run(start)
    assert made.left == []
    assert start.gone_at is not None
    start.gone_at -= 101  # as time goes by
    made.run(start)
    assert made.left == [pytest.approx(LEAD_S, abs=5)]
    assert "asking the ranks to save and end, for 3 ranks on a:1, c.cluster:2" in made.said[-1]
    assert start.leaving
    made.run(start)
    assert len(made.left) == 1
    assert not made.notices.over
    assert made.members.chosen() == [A, C]


@pytest.mark.parametrize("seconds", [0.0, 3.0, LEAD_S])
def test_ranks_leave_at_once_when_there_is_little_time(made: Fixture, seconds: float) -> None:
    start = made.start(A, B, C)
    assert made.notices.take(Notice("b", seconds), "").text.startswith("the ranks save and end now, ")
    made.run(start)
    assert made.left == [pytest.approx(max(seconds, GRACE_S), abs=3)]


def test_a_second_notice_moves_the_time_forward_only(made: Fixture) -> None:
    start = made.start(A, B, C)
    made.notices.take(Notice("b", 100.0), "")
    first = start.gone_at
    assert "in 80 s" in made.notices.take(Notice("b", 5000.0), "").text
    assert start.gone_at == first
    assert "in 30 s" in made.notices.take(Notice("b", 50.0), "").text
    both = made.notices.take(Notice("c", 60.0), "")
    assert both.text == "the ranks save and end in 30 s, and go on without c.cluster, as 1 rank on a:1"
    assert made.members.chosen() == [A]


def test_a_host_stays_away_after_it_has_gone(made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    made.start(A, B, C)
    made.notices.take(Notice("b", 5000.0), "")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5200.0)
    assert made.members.chosen() == [A, C]
    monkeypatch.setattr(time, "monotonic", lambda: now + 5400.0)
    assert made.members.chosen() == [A, B, C]


def test_a_host_may_be_named_without_its_domain_or_by_where_the_notice_was_given(made: Fixture) -> None:
    start = made.start(A, B, C)
    assert "without c.cluster" in made.notices.take(Notice("c", 100.0), "").text
    assert "without b" in start.take_notice(Notice("", 100.0), 1).text


def test_a_host_that_the_job_does_not_have_is_refused(made: Fixture) -> None:
    start = made.start(A, B, C)
    answer = made.notices.take(Notice("z", 100.0), "")
    assert answer == Noticed(False, "z is not one of the hosts of this job: a, b, c.cluster")
    assert made.said == []
    assert start.gone_at is None
    assert made.members.left_out == []


def test_a_host_without_ranks_is_left_out_of_the_next_start(tmp_path: Path) -> None:
    made = Fixture(tmp_path / "hosts", most=2)
    start = made.start(A, B)
    assert made.notices.take(Notice("c", 1.0), "").text == "no ranks run on c.cluster, and the next start leaves it out"
    made.run(start)
    assert made.left == []
    assert "and go on without b, as 1 rank on a:1" in made.notices.take(Notice("b", 1.0), "").text


def test_too_few_slots_are_waited_for(tmp_path: Path) -> None:
    made = Fixture(tmp_path / "hosts", least=4)
    start = made.start(A, B, C)
    text = "the ranks save and end in 10 s; without b the job has fewer slots than --min-np 4, and waits"
    assert made.notices.take(Notice("b", 30.0), "").text == text
    assert start.gone_at is not None
    start.gone_at -= 11
    made.run(start)
    assert made.left == [pytest.approx(LEAD_S, abs=5)]
    assert made.said[-1].endswith("asking the ranks to save and end, and the job waits for hosts")


def test_a_change_of_the_host_file_meanwhile_is_not_lost_nor_is_the_notice(made: Fixture) -> None:
    start = made.start(A, B, C)
    made.notices.take(Notice("b", 100.0), "")
    made.name("a\nb\nc.cluster slots=2\nd", start)
    assert made.left == [LEAVE_S], "there is no reason to wait"
    assert made.members.chosen() == [A, C, Host("d", 1)]
    assert "the ranks save and end already, and go on without b" in made.notices.take(Notice("b", 50.0), "").text
    assert len(made.left) == 1


def test_a_host_that_is_named_anew_is_back(tmp_path: Path) -> None:
    made = Fixture(tmp_path / "hosts", most=2)
    start = made.start(A, B)
    made.notices.take(Notice("b", 100.0), "")
    made.name("a\nb slots=2\nc.cluster slots=2", start)
    assert made.left == [], "the same ranks would run on the same hosts"
    assert start.gone_at is not None
    start.gone_at -= 100
    made.run(start)
    assert made.left == []


def test_the_job_ends_with_the_machine_of_rannc_run(made: Fixture) -> None:
    start = made.start(A, B, C)
    answer = made.notices.take(Notice("", 100.0), "")
    assert answer.taken
    assert "rannc-run itself runs there: the ranks save and end in 80 s, and the job ends" in answer.text
    made.run(start)
    assert made.left == []
    assert "save and end now" in made.notices.take(Notice("localhost", 10.0), "").text
    assert made.notices.over
    made.run(start)
    made.run(start)
    assert made.left == [pytest.approx(10, abs=3)]
    assert made.said[-1].endswith("and the job ends")


def test_ranks_that_leave_already_leave_sooner_if_the_job_ends(made: Fixture) -> None:
    start = made.start(A, B, C)
    made.name("a\nb", start)
    made.notices.take(Notice("", 10.0), "")
    made.run(start)
    assert made.left == [LEAVE_S, pytest.approx(10, abs=3)]


def test_without_a_host_file_every_host_is_needed(tmp_path: Path) -> None:
    made = Fixture(tmp_path / "hosts", file=False)
    made.start(A, B)
    assert made.notices.take(Notice("z", 9.0), "") == Noticed(False, "z is not one of the hosts of this job: a, b")
    assert "there is no host file that could name other hosts: " in made.notices.take(Notice("b", 9.0), "").text
    assert made.notices.over


def test_notices_between_two_starts_are_answered(made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_LOOK_S", 0.02)
    made.start(A, B, C)
    made.notices.open()
    with ThreadPoolExecutor(1) as pool:
        (name,) = notice_socket.listeners()
        asked = pool.submit(notice_socket.ask, name, Notice("b", 100.0), LONG_S)
        made.notices.pause(0.5)
        while not asked.done():
            made.notices.pause(0.02)
        assert asked.result() == Noticed(True, "no ranks run on b, and the next start leaves it out")
        asked = pool.submit(notice_socket.ask, name, Notice("", 1.0), LONG_S)
        begin = time.monotonic()
        made.notices.pause(10 * LONG_S)
        assert time.monotonic() - begin < LONG_S, "it does not wait when it is over"
        assert made.notices.over
        answer = asked.result()
    assert answer is not None
    assert answer.text.startswith("rannc-run itself runs there: no ranks run, and the job ends")
    made.notices.close()
    assert notice_socket.listeners() == []


def test_notices_are_heard_while_ranks_run(made: Fixture) -> None:
    start = made.start(A, B, C)
    made.notices.open()
    (name,) = notice_socket.listeners()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(notice_socket.ask, name, Notice("b", 1.0), LONG_S)
        while not asked.done():
            made.run(start)
            time.sleep(0.01)
        answer = asked.result()
    assert answer is not None
    assert answer.taken
    assert made.left
    made.notices.close()
