"""What ranks have left in memory is written by their watchers, after all ranks have ended."""

from __future__ import annotations

import json
import os
import signal
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from idle_errand import IdleErrand
from monitored import MPIRUN, SRUN, run

import rannd
from rannd.runner.elastic.rescue_plan import plan_rescue
from rannd.runner.watch.errand import HeldPart, RescueOrder
from rannd.runner.watch.line_channel import Listener

RANK = """
import os, resource, signal, sys, time
from rannd.ranks import memory_files as memory
rank, folder, end = int(os.environ["SLURM_PROCID"]), sys.argv[1], sys.argv[2]
own, _, copies, _ = memory.given()
def write(file, rank, place):
    blob = bytes([rank]) * 100000
    record = memory.KeptPart(7, 12, rank, 2, folder, [f"file-{rank}"], [len(blob)])
    os.pwrite(file, record.prefix() + blob, place)
    memory.set_whole(file, place)
    return place + record.bytes
write(own, rank, 0)
write(copies, 1 - rank, 0)
open(f"{folder}/ready-{rank}", "w").close()
while not all(os.path.exists(f"{folder}/ready-{each}") for each in (0, 1)):
    time.sleep(0.01)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "one" and rank == 1:
    os.kill(os.getppid(), signal.SIGKILL)  # its watcher: the kernel ends the rank
    time.sleep(300)
if end == "full" and rank == 1:
    resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (50000, 50000))  # its watcher cannot write so many bytes
sys.exit(int(end) if end.isdecimal() else 3)
"""


class Errand(IdleErrand):
    """Plans a rescue as elastic jobs do; `at_rescue` is called when one begins."""

    def __init__(self, at_rescue: Any = None) -> None:
        self.order: RescueOrder | None = None
        self.errors: list[str] = []
        self._at_rescue = at_rescue

    def plan_rescue(self, held: Mapping[int, Sequence[HeldPart]], *, failed: bool) -> RescueOrder | None:
        self.order = plan_rescue(held, -1) if failed else None
        if self.order is not None and self._at_rescue is not None:
            self._at_rescue()
        return self.order

    def end_rescue(self, order: RescueOrder, error: str) -> None:
        assert order is self.order
        self.errors.append(error)


def job(folder: Path, end: str, errand: Errand, launched: str = SRUN) -> Any:
    root = str(Path(rannd.__file__).parents[1])
    command = ("-c", RANK, str(folder), end)
    return run(Listener(None), 2, *command, errand=errand, variables={"PYTHONPATH": root}, launched=launched)


def check(order: RescueOrder | None) -> None:
    """All of the step is in the folder, with sizes and checksums."""
    assert order is not None
    folder = Path(order.folder)
    for rank in (0, 1):
        data = bytes([rank]) * 100000
        assert (folder / f"file-{rank}").read_bytes() == data
        said = json.loads((folder / f"part-{rank}.json").read_text())
        assert said == {f"file-{rank}": {"bytes": len(data), "crc32": zlib.crc32(data)}}
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("launched", [SRUN, MPIRUN])
def test_ranks_that_are_all_killed_at_once(tmp_path: Path, launched: str) -> None:
    errand = Errand()
    result = job(tmp_path, "killed", errand, launched)
    assert {end.status for end in result.ends} == {-signal.SIGKILL}
    assert errand.errors == [""]
    check(errand.order)
    assert errand.order is not None
    assert errand.order.parts == {0: [0], 1: [1]}


def test_a_watcher_that_is_gone_is_stood_in_for(tmp_path: Path) -> None:
    errand = Errand()
    job(tmp_path, "one", errand)
    assert errand.errors == [""]
    check(errand.order)
    assert errand.order is not None
    assert errand.order.parts == {0: [0, 1]}


def test_what_one_watcher_cannot_write_is_written_by_another(tmp_path: Path) -> None:
    errand = Errand()
    job(tmp_path, "full", errand)
    assert errand.errors == [""]
    check(errand.order)
    assert errand.order is not None
    assert errand.order.parts == {0: [0], 1: [1]}


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """A disk may not be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    errand = Errand(lambda: folder.rename(tmp_path / "gone"))
    job(folder, "3", errand)
    assert len(errand.errors) == 1
    assert "No such file or directory" in errand.errors[0]
    assert not folder.exists()


def test_a_training_that_ends_well_needs_no_rescue(tmp_path: Path) -> None:
    errand = Errand()
    assert [end.status for end in job(tmp_path, "0", errand).ends] == [0, 0]
    assert errand.order is None
    assert not list(tmp_path.glob("*rescued*"))


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    def block() -> None:
        for each in ("ready-0", "ready-1"):
            (tmp_path / each).unlink()
        tmp_path.rmdir()
        tmp_path.touch()

    errand = Errand(block)
    job(tmp_path, "3", errand)
    assert len(errand.errors) == 1
    assert "Not a directory" in errand.errors[0]
    tmp_path.unlink()
    tmp_path.mkdir()


@pytest.mark.parametrize(
    ("signals", "kept"),
    [((signal.SIGINT,), False), ((signal.SIGTERM,), True), ((signal.SIGTERM, signal.SIGTERM), False)],
)
def test_signals_while_it_is_written(tmp_path: Path, signals: tuple[signal.Signals, ...], kept: bool) -> None:
    """SIGTERM leaves the time to write, Ctrl-C or a second signal does not."""
    folder = tmp_path / "slow"
    folder.mkdir()

    def slow() -> None:
        # The file is a pipe that nobody reads until the signals were taken.
        assert errand.order is not None
        Path(errand.order.folder).mkdir()
        os.mkfifo(Path(errand.order.folder) / "file-0")
        for number, signum in enumerate(signals):
            threading.Timer(0.3 + number, os.kill, (os.getpid(), signum)).start()
        threading.Timer(3.0, read).start()

    def read() -> None:
        assert errand.order is not None
        try:
            with os.fdopen(os.open(Path(errand.order.folder) / "file-0", os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
                os.set_blocking(pipe.fileno(), True)
                while pipe.read(1 << 16):
                    pass
        except OSError:
            pass

    errand = Errand(slow)
    result = job(folder, "3", errand)
    assert result.signal == signals[0]
    assert errand.errors == ([""] if kept else [f"{signals[-1].name} has ended it"])
