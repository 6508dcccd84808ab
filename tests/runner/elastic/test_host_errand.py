"""What happens to a job while its ranks run: changes of its hosts, and what the ranks say."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rannd.ranks import rank_notes
from rannd.runner.elastic import host_file, members
from rannd.runner.elastic.host_errand import History, HostErrand
from rannd.runner.elastic.host_file import HostFile
from rannd.runner.elastic.members import Members
from rannd.runner.elastic.patience import FEW, Patience
from rannd.runner.elastic.restarts import Restarts
from rannd.runner.elastic.slow_hosts import SlowHosts
from rannd.runner.watch.errand import HeldPart


class Fixture:
    """An errand over a host file, and what it did."""

    def __init__(self, path: Path, text: str, least: int = 1) -> None:
        path.write_text(text)
        self.said: list[str] = []
        self.left: list[float] = []
        self.file = HostFile(path, self.said.append)
        self.members = Members(least, 0)
        self.members.name(self.file.hosts)
        self.restarts = Restarts(10)
        self.patience = Patience()
        self.start()

    def start(self) -> None:
        """Start the ranks on the hosts that there are."""
        here = self.members.chosen()
        self.slow = SlowHosts(self.file.path.parent / "logs", self.members, True, self.said.append)
        self.slow.begin([host.name for host in here for _ in range(host.slots)])
        history = History(self.restarts, self.patience, self.slow)
        self.errand = HostErrand(self.file, self.members, here, 30.0, 5.0, history, self.said.append)

    def write(self, text: str) -> None:
        """Change the file, and give the errand time to see it."""
        self.file.path.write_text(text)
        for _ in range(2):
            self.errand.run(self.left.append)
            time.sleep(0.06)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    monkeypatch.setattr(host_file, "SETTLE_S", 0.05)
    return Fixture(tmp_path / "hosts", "localhost slots=2", least=2)


def test_ranks_leave_when_the_hosts_change(made: Fixture) -> None:
    made.write("localhost slots=3")
    assert made.left == [30.0]
    assert made.errand.changing
    assert "asking 2 ranks on localhost:2 to save and end, for 3 ranks on localhost:3" in made.said[0]
    made.write("localhost slots=4")
    assert made.left == [30.0], "they were asked already"


def test_ranks_leave_when_too_few_slots_are_left(made: Fixture) -> None:
    made.write("localhost slots=1")
    assert made.left == [30.0]
    assert "fewer slots than --min-np 2" in made.said[0]


def test_the_own_machine_is_not_removed(made: Fixture) -> None:
    made.write("elsewhere slots=3")
    assert not made.left
    assert "rannc-run itself runs here" in made.said[0]
    made.write("localhost slots=2")
    assert not made.left
    assert len(made.said) == 1


def test_a_host_beyond_the_maximum_changes_nothing(tmp_path: Path, made: Fixture) -> None:
    made.members.most = 2
    made.write("localhost slots=5")
    assert not made.left


def often(made: Fixture, cost_s: float) -> None:
    """Let there have been changes, as many as count and all of them just now, and a restart that took so long."""
    now = time.monotonic()
    made.patience.ask(now)
    made.patience.start(now)
    made.patience.step(now + cost_s)
    for _ in range(FEW):
        made.patience.change(now)


def test_where_hosts_change_often_new_ones_wait_for_the_next_start(tmp_path: Path, made: Fixture) -> None:
    made = Fixture(tmp_path / "more", "localhost slots=1\nother slots=1")
    often(made, 600.0)
    made.write("localhost slots=2\nother slots=1")
    made.write("localhost slots=2\nother slots=1\nthird slots=4")
    assert not made.left
    assert "1 new slot waits for the next start, for 1200 s at most" in made.said[0]
    assert "5 new slots wait for the next start, for 240 s at most" in made.said[1]
    assert "a start takes 600 s" in made.said[1]
    made.write("localhost slots=1\nother slots=1")
    assert (made.left, len(made.said)) == ([], 2), "they are gone"
    made.write("localhost slots=1\nother slots=1\nthird slots=1")
    made.write("localhost slots=1\nthird slots=1")
    assert made.left == [30.0], "a host is lost, and the new one joins"
    assert "third:1" in made.said[-1]


def test_new_hosts_have_waited_for_long_enough(made: Fixture) -> None:
    often(made, 0.2)
    made.write("localhost slots=4")
    assert not made.left, "0.2 s of two slots is 0.2 s of two others"
    deadline = time.monotonic() + 60
    while not made.left and time.monotonic() < deadline:
        made.errand.run(made.left.append)
        time.sleep(0.01)
    assert made.left == [30.0]
    assert made.said[-1].startswith("New slots have waited for long enough: asking 2 ranks on localhost:2")


def test_what_a_restart_costs_is_measured(made: Fixture) -> None:
    made.write("localhost slots=3")
    made.start()
    made.errand.take_note({"began": 7})
    assert made.patience.cost_s is None
    made.errand.take_note({"step": 8})
    assert made.patience.cost_s is not None
    assert 0 < made.patience.cost_s < 60


def test_a_host_that_was_left_out_is_no_reason_for_a_restart(
    tmp_path: Path, made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "RETRY_S", 0.2)
    made = Fixture(tmp_path / "more", "localhost slots=2\nlost slots=2\nspare slots=2")
    for name in ("lost", "spare"):
        made.members.leave_out(name)
    made.start()
    while made.members.left_out:
        time.sleep(0.01)
    made.write("localhost slots=2\nlost slots=2")
    assert not made.left
    made.write("localhost slots=2\nlost slots=2\nnew slots=1")
    assert made.left == [30.0]
    assert "lost:2, new:1" in made.said[-1]


def test_a_host_that_is_about_to_go_lets_new_ones_wait_all_the_same(tmp_path: Path, made: Fixture) -> None:
    made = Fixture(tmp_path / "more", "localhost slots=1\nother slots=1")
    often(made, 600.0)
    made.members.leave_out("other")  # after a notice; its ranks still train
    made.write("localhost slots=1\nother slots=1\nnew slots=1")
    made.write("localhost slots=1\nnew slots=1")
    assert not made.left
    assert len(made.said) == 1


def test_what_ranks_say(made: Fixture) -> None:
    assert not made.errand.speaks
    made.errand.take_note({"began": 0})
    assert made.errand.saved == -1
    made.errand.take_note({"began": 3})
    assert made.errand.saved == 3
    made.errand.take_note({"step": 7, "saved": 5})
    assert (made.restarts.reached, made.errand.saved, made.errand.speaks) == (7, 5, True)
    made.errand.take_note({"left": 9, "most": 4})
    assert (made.errand.left, made.errand.left_after, made.errand.saved) == (True, 9, 5)
    assert made.members.possible == 4


def test_a_checkpoint_is_progress_of_a_script_that_saves_itself(made: Fixture) -> None:
    for step in range(1000, 9000, 1000):
        made.errand.take_note({"saved": step})
        assert made.restarts.fail() == 0.0
    assert not made.errand.speaks


def test_a_slow_host_is_left_out_when_the_hosts_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_file, "SETTLE_S", 0.05)
    made = Fixture(tmp_path / "hosts", "localhost slots=2\nb\nc slots=2")
    made.errand.take_note({"slow": 3, "slow_percent": 231})
    assert made.slow.file.read_text() == "c 2.31\n"
    assert "host c computes 2.3 times as long as the others" in made.said[0]
    made.errand.run(made.left.append)
    assert not made.left, "it alone is no reason to start again"
    made.write("localhost slots=2\nb slots=2\nc slots=2")
    assert made.left == [30.0]
    assert [host.name for host in made.members.chosen()] == [made.members.named[0].name, "b"]


@pytest.mark.parametrize("percent", [None, 2.5, "200", True, -200, 50, 10**4000])
@pytest.mark.parametrize("rank", [0, 9])
def test_a_slow_host_of_which_no_rank_speaks_is_left_out(made: Fixture, rank: int, percent: object) -> None:
    made.errand.take_note({"slow": rank, "slow_percent": percent})
    made.errand.take_note({"slow": 9, "slow_percent": 200})
    assert not made.said
    assert not made.slow.file.exists()


@pytest.mark.parametrize("note", [{}, {"step": "7"}, {"step": -1}, {"saved": 1.5}, {"left": True}, {"left": None}])
def test_what_no_rank_says_is_left_out(made: Fixture, note: dict[str, object]) -> None:
    made.errand.take_note(note)
    assert (made.restarts.reached, made.errand.saved, made.errand.left) == (-1, -1, False)


def test_checkpoints_that_the_script_saves_for_itself_keep_nothing_from_being_rescued(made: Fixture) -> None:
    held = {0: [HeldPart(3, 12, 0, 1, "/c")]}
    made.errand.take_note({rank_notes.BEGAN: 4})
    made.errand.take_note({rank_notes.SAVED: 5000})
    assert made.errand.plan_rescue(held, failed=False) is None
    order = made.errand.plan_rescue(held, failed=True)
    assert order is not None
    assert order.step == 12
    made.errand.take_note({rank_notes.WHOLE: 12})
    assert made.errand.plan_rescue(held, failed=True) is None, "it is saved"
