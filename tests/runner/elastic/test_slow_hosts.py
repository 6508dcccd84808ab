"""What rannc-run does about slow hosts: the file, and who is left out of the next start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rannd import config
from rannd.config import Config
from rannd.errors import ConfigError
from rannd.ranks.row_shares import RowShares
from rannd.runner.elastic.members import Members
from rannd.runner.elastic.slow_hosts import SlowHosts
from rannd.runner.resources.host_list import Host
from rannd.runner.run_options import Options
from rannd.runner.supervisor import Supervisor

OWN = socket.gethostname()


class Fixture:
    """A job of three hosts, two of which are other machines."""

    def __init__(self, folder: Path, *, drop: bool, least: int = 1) -> None:
        self.said: list[str] = []
        self.members = Members(least, 0)
        self.members.name([Host(OWN, 1), Host("b", 2), Host("c", 1)])
        self.slow = SlowHosts(folder, self.members, drop, self.said.append)
        self.slow.clear()
        self.slow.begin([OWN, "b", "b", "c"])

    def next_hosts(self) -> list[str]:
        self.slow.leave_out()
        return [host.name for host in self.members.chosen()]


def test_the_file_names_slow_hosts_of_all_starts(tmp_path: Path) -> None:
    made = Fixture(tmp_path / "new" / "logs", drop=False)
    assert made.slow.file == tmp_path / "new" / "logs" / "slow_hosts"
    assert not made.slow.file.parent.exists(), "there is no slow host yet"
    made.slow.take(1, 160)
    made.slow.take(3, 320)
    assert made.slow.file.read_text() == "c 3.20\nb 1.60\n"
    made.slow.begin(["c", OWN])
    made.slow.take(0, 150)
    assert made.slow.file.read_text() == "b 1.60\nc 1.50\n"
    assert made.said[0] == f"host b computes 1.6 times as long as the others ({made.slow.file})"
    Fixture(tmp_path / "new" / "logs", drop=False)
    assert not made.slow.file.exists(), "another job begins without"


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = Fixture(tmp_path / "file", drop=False)
    made.slow.take(3, 200)
    assert made.said[-1].startswith("host c computes 2.0 times as long as the others (")
    assert str(tmp_path / "file") in made.said[-1]
    (tmp_path / "slow_hosts").mkdir()
    made = Fixture(tmp_path, drop=False)
    assert "cannot be removed" in made.said[0]
    made.slow.take(3, 200)
    assert "cannot be written" in made.said[-1]


def test_slow_hosts_are_left_out_of_the_next_start_if_asked(tmp_path: Path) -> None:
    made = Fixture(tmp_path, drop=True)
    made.slow.take(3, 200)
    assert "left out of the next start (--drop-stragglers)" in made.said[0]
    assert [host.name for host in made.members.chosen()] == [OWN, "b", "c"], "the present start goes on"
    assert made.next_hosts() == [OWN, "b"]
    made = Fixture(tmp_path, drop=False)
    made.slow.take(3, 200)
    assert made.next_hosts() == [OWN, "b", "c"]


def test_ranks_of_slow_hosts_get_fewer_rows_in_later_starts(tmp_path: Path) -> None:
    made = Fixture(tmp_path, drop=False)
    assert made.slow.shares() is None
    made.slow.take(1, 231, 2, 140)
    assert made.said[-1].endswith("; its ranks get fewer rows from the next start on, if that helps")
    made.slow.begin([OWN, "b", "c"])
    assert made.slow.shares() == RowShares(2, 140, (100, 231, 100))
    made.slow.begin([OWN, "c"])
    assert made.slow.shares() is None, "no slow host is there"
    made.slow.begin([OWN, "b", "c"])
    assert made.slow.shares() is None, "it has come back, and may be another machine"


def test_shares_are_even_again_after_a_start_that_fails_at_once(tmp_path: Path) -> None:
    made = Fixture(tmp_path, drop=False)
    made.slow.even_out()
    assert made.said == []
    made.slow.take(1, 231, 2, 140)
    made.slow.begin([OWN, "b", "c"])
    made.slow.even_out()
    assert made.said[-1] == "the next start has as many rows on slow hosts as on others"
    made.slow.begin([OWN, "b", "c"])
    assert made.slow.shares() is None


def test_a_host_that_has_recovered_gets_as_many_rows_as_others(tmp_path: Path) -> None:
    made = Fixture(tmp_path, drop=False)
    made.slow.take(0, 100, 2, 140)
    assert made.said == [], "it was not slow"
    made.slow.take(1, 231, 2, 140)
    made.slow.take(3, 160, 2, 140)
    made.slow.take(1, 100, 2, 140)
    assert made.said[-1] == "host b computes as fast as the others again"
    made.slow.begin([OWN, "b", "c"])
    assert made.slow.shares() == RowShares(2, 140, (100, 100, 160))
    assert made.slow.file.read_text() == "b 2.31\nc 1.60\n", "of the whole job"


@pytest.mark.parametrize("bounds", [(0, 0), (0, 9), (5, 0), (-1, 9)])
def test_rows_of_slow_hosts_stay_where_fewer_are_of_no_use(tmp_path: Path, bounds: tuple[int, int]) -> None:
    made = Fixture(tmp_path, drop=False)
    made.slow.take(1, 231, *bounds)
    assert "fewer rows" not in made.said[-1]
    made.slow.begin([OWN, "b", "c"])
    assert made.slow.shares() is None


def test_this_machine_and_the_minimum_stay(tmp_path: Path) -> None:
    made = Fixture(tmp_path, drop=True, least=3)
    made.slow.take(0, 500)
    made.slow.take(1, 200)
    made.slow.take(3, 190)
    assert made.next_hosts() == [OWN, "b"], "without b there are two slots"
    assert f"{OWN} is slow, but stays: rannc-run itself runs here" in made.said
    assert "b is slow, but stays: without it there are fewer slots than --min-np" in made.said


# --- a job ----------------------------------------------------------------------------------------


def _supervised(tmp_path: Path, *, log_dir: Path | None, hosts: bool) -> Supervisor:
    file = tmp_path / "hosts"
    file.write_text(f"{OWN}\nb\nc\n")
    options = Options(command=("none.py",), hostfile=file if hosts else None, log_dir=log_dir)
    return Supervisor(options, Config(drop_stragglers=True), {"HOME": str(tmp_path)}, "none.py")


def test_a_supervisor_leaves_them_out_of_each_start(tmp_path: Path) -> None:
    made = _supervised(tmp_path, log_dir=None, hosts=True)
    made._slow.begin([OWN, "b", "c"])
    assert made._gather() == [Host(OWN, 1), Host("b", 1), Host("c", 1)]
    made._slow.take(1, 210)
    assert (tmp_path / ".pyrannc" / "slow_hosts").read_text() == "b 2.10\n"
    assert made._gather() == [Host(OWN, 1), Host("c", 1)]


def test_the_file_is_in_the_log_directory_if_there_is_one(tmp_path: Path) -> None:
    assert _supervised(tmp_path, log_dir=tmp_path / "logs", hosts=True)._slow.file == tmp_path / "logs" / "slow_hosts"


def test_without_a_host_file_nobody_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _supervised(tmp_path, log_dir=None, hosts=False)
    assert "drop_stragglers = true (set in code) has no effect without a host file" in capsys.readouterr().err


def test_a_factor_below_1_is_wrong() -> None:
    for right in (0.0, 1.0, 3.5):
        assert Config(straggler_factor=right).straggler_factor == right
    with pytest.raises(ConfigError, match=r"straggler_factor = 0.5 \(RANNC_STRAGGLER_FACTOR\); set it to 1 or more"):
        config.load({"RANNC_STRAGGLER_FACTOR": "0.5", "HOME": "/nowhere"})
