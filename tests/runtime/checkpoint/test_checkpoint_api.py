"""Checkpoints in a world of one rank: whole or not at all, read without running anything, readable by plain torch."""

from __future__ import annotations

import errno
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import pyrannc
from rannd.errors import CheckpointError, UsageError
from rannd.runtime.checkpoint import saving
from rannd.runtime.storage import atomic_folder
from rannd.runtime.storage.dcp_metadata import read_index


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.two.weight = self.one.weight
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.two(self.drop(torch.relu(self.one(x))))


class Run:
    """A training that draws random numbers in every way."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.inner = Net().double()
        self.optimizer = torch.optim.AdamW(self.inner.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3], 0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.model = pyrannc.RaNNCModule(self.inner, self.optimizer)

    def step(self) -> float:
        x = torch.randn(4, 6, dtype=torch.float64) * random.random() + float(np.random.rand())
        self.optimizer.zero_grad()
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def save(self, path: Path, **options: Any) -> Any:
        return pyrannc.save_checkpoint(
            path, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler, **options
        )

    def load(self, path: Path) -> Any:
        return pyrannc.load_checkpoint(path, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler)

    def values(self) -> dict[str, Any]:
        flat = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, state in self.optimizer.state_dict(from_global=True)["state"].items():
            flat |= {f"{number}.{name}": value for name, value in state.items()}
        return {name: value.clone() for name, value in flat.items()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("deployed", [False, True])
def test_a_resumed_run_equals_one_that_was_not_stopped(
    tmp_path: Path, deployed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANNC_PIPELINE_NUM", "1")  # without a cache, measured costs could choose another number
    run = Run()
    run.step()
    run.scaler.scale(torch.ones(1))
    run.scaler.update(8.0)
    extra = {"epoch": 3, "best": (float("inf"), None), 5: [b"\0", "x", True]}
    run.save(tmp_path / "deep" / "c", step=1, extra=extra)
    wanted = [run.step() for _ in range(3)]
    other = Run(7)
    if deployed:
        other.step()
    found = other.load(tmp_path / "deep" / "c")
    assert (found.step, found.extra) == (1, extra)
    assert other.scaler.get_scale() == 8.0
    assert [other.step() for _ in range(3)] == wanted
    assert equal(other.values(), run.values())
    assert isinstance(other.scheduler.milestones, type(run.scheduler.milestones))


def test_before_the_first_call_and_without_a_wrapper(tmp_path: Path) -> None:
    run = Run()
    run.save(tmp_path / "new")
    plain = Net().double()
    pyrannc.load_checkpoint(tmp_path / "new", plain)
    assert torch.equal(plain.one.weight, run.inner.one.weight)
    pyrannc.save_checkpoint(tmp_path / "plain", plain, torch.optim.AdamW(plain.parameters()), step=4)
    run.step()
    assert pyrannc.load_checkpoint(tmp_path / "plain", run.model, run.optimizer).step == 4
    assert torch.equal(plain.one.weight, run.inner.one.weight)
    assert not run.optimizer.state_dict()["state"]


def test_plain_torch_reads_it(tmp_path: Path) -> None:
    run = Run()
    run.step()
    run.save(tmp_path / "c")
    plain = Net().double()
    optimizer = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    state = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells that it is alone
        dcp.load(state, checkpoint_id=tmp_path / "c")
    assert all(torch.equal(state["model"][name], value) for name, value in run.model.state_dict().items())
    moments = state["optimizer"]["state"]["one.weight"]
    assert torch.equal(moments["exp_avg"], run.optimizer.state[run.inner.one.weight]["exp_avg"])
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.1
    files = list((tmp_path / "c").glob("*.distcp"))
    index = read_index(tmp_path / "c")
    places = {str(key.fqn): value for key, value in index.storage_data.items()}
    assert places["model.one.weight"] == places["model.two.weight"]  # tied: once, under both names
    assert len(files) == 1


def test_plain_torchs_checkpoints_are_read(tmp_path: Path) -> None:
    plain = Net().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(plain.state_dict(), checkpoint_id=tmp_path / "bare")
        dcp.save({"net": plain.state_dict(), "n": 3}, checkpoint_id=tmp_path / "nested")
    for name, prefix in (("bare", None), ("nested", "net.")):
        run = Run(8)
        run.step()
        found = pyrannc.load_checkpoint(tmp_path / name, run.model, prefix=prefix)
        assert (found.step, found.extra) == (None, None)
        assert torch.equal(run.inner.two.weight, plain.one.weight)
    with pytest.raises(CheckpointError, match=r"no state of optimizer.*no checkpoint.json"):
        pyrannc.load_checkpoint(tmp_path / "bare", run.model, run.optimizer)
    with pytest.raises(CheckpointError, match=r"net\.calls is not in the model"):
        pyrannc.load_checkpoint(tmp_path / "nested", run.model)


def test_an_asynchronous_save_has_the_values_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.step()
    go = threading.Event()
    real = saving.write_shard

    def late(*args: Any) -> Any:
        go.wait()
        return real(*args)

    monkeypatch.setattr(saving, "write_shard", late)
    wanted = run.values()
    pending = run.save(tmp_path / "one", asynchronous=True, step=1)
    run.step()
    assert not equal(run.values(), wanted)
    assert not pending.done()
    assert not (tmp_path / "one").exists()
    go.set()
    run.save(tmp_path / "two", asynchronous=True, step=2)  # waits for the first
    assert pending.done()
    other = Run(5)
    assert other.load(tmp_path / "one").step == 1
    assert equal(other.values(), wanted)
    assert other.load(tmp_path / "two").step == 2
    monkeypatch.setattr(saving, "write_shard", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
    lost = run.save(tmp_path / "two", asynchronous=True)
    with pytest.raises(CheckpointError, match=r"asynchronous save to .*two failed.*No space left"):
        run.save(tmp_path / "three")
    lost.wait()  # it has been told
    monkeypatch.setattr(saving, "write_shard", real)
    assert run.load(tmp_path / "two").step == 2


def test_a_save_goes_on_where_no_thread_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The savers of other ranks would wait for this one's part, and the next save for them."""

    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    run, other = Run(), Run(3)
    run.step()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        pending = run.save(tmp_path / "c", step=1, asynchronous=True)
    assert "can't start new thread" in "".join(capfd.readouterr())
    assert pending.done()
    pending.wait()
    assert other.load(tmp_path / "c").step == 1


def test_whatever_a_state_dict_raises_is_an_error_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()

    def wrong() -> None:
        raise LookupError("no \udc80 state")

    monkeypatch.setattr(run.scheduler, "state_dict", wrong)
    with pytest.raises(UsageError, match=r"cannot be made: LookupError: no \\udc80 state") as caught:
        run.save(tmp_path / "c")
    assert isinstance(caught.value.__cause__, LookupError)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    """Every call that changes the disk is the last one once; with and without the exchange of two folders."""
    if not exchange:
        monkeypatch.setattr(atomic_folder, "exchange", lambda one, other: False)
    run, other = Run(), Run(3)
    run.step()
    place, aside = tmp_path / "c", tmp_path / "aside"
    run.save(place, step=1)
    shutil.copytree(place, aside)
    old = run.values()
    run.step()
    new = run.values()
    found = []
    for fatal in range(1, 100):
        child = os.fork()
        if child == 0:
            _die_at(fatal)
            run.save(place, step=2)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        found.append(other.load(place).step)
        assert equal(other.values(), {1: old, 2: new}[found[-1]])
        if os.WIFEXITED(status):
            break
        other.save(tmp_path / "beside")  # any save into the folder cleans up what the killed one left
        left = {path.name for path in tmp_path.iterdir() if atomic_folder.NEW not in path.name}
        assert left == {"c", "aside", "beside"}
        assert not [
            path
            for new in tmp_path.glob(f".*{atomic_folder.NEW}*")
            for path in new.iterdir()
            if path.name != atomic_folder.TOKEN
        ]
        shutil.rmtree(place)
        shutil.copytree(aside, place)
    assert os.WEXITSTATUS(status) == 0
    assert found == sorted(found)
    assert found.count(1) >= 8
    assert found[-1] == 2


def _die_at(fatal: int) -> None:
    """End this process without a word at the `fatal`-th call that changes the disk."""
    count = 0

    def deadly(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == fatal:
                os.kill(os.getpid(), 9)
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))
    atomic_folder.exchange = deadly(atomic_folder.exchange)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "script.pt", "checkpoint.json"])
@pytest.mark.parametrize("damage", [_flip, lambda path: path.write_bytes(path.read_bytes()[:-9]), Path.unlink])
def test_damage_is_found_before_anything_is_loaded(tmp_path: Path, name: str, damage: Callable[[Path], Any]) -> None:
    run = Run()
    run.step()
    run.save(tmp_path / "c")
    run.step()
    before, numbers = run.values(), torch.get_rng_state()
    damage(tmp_path / "c" / name)
    with pytest.raises(CheckpointError, match=r"damaged|cannot be read|no checkpoint"):
        run.load(tmp_path / "c")
    assert equal(run.values(), before)
    assert torch.equal(torch.get_rng_state(), numbers)


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["EVIL"],))


@pytest.mark.parametrize(
    "payload",
    [
        lambda: pickle.dumps(Evil()),
        lambda: pickle.dumps({"a": Evil()}, protocol=2),
        lambda: b"cos\nsystem\n(S'true'\ntR.",
        lambda: pickle.dumps([1, 2]),
        lambda: b"",
        lambda: b"nonsense",
        lambda: pickle.dumps(dcp.metadata.Metadata({"x": Evil()})),
    ],
)
def test_an_index_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, payload: Callable[[], bytes]) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").write_bytes(payload())
    with pytest.raises(CheckpointError, match="damaged, or not one"):
        pyrannc.load_checkpoint(tmp_path / "c", Net())
    assert not (tmp_path / "evil").exists()


def test_another_model_or_optimizer_is_told(tmp_path: Path) -> None:
    run = Run()
    run.step()
    pyrannc.save_checkpoint(tmp_path / "c", run.model, run.optimizer)
    before = run.values()
    with pytest.raises(CheckpointError, match=r"another model: one\.weight is \(6, 6\) in the checkpoint, \(5, 5\)"):
        pyrannc.load_checkpoint(tmp_path / "c", Net(5))
    bigger = Net().double()
    bigger.more = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"more\.weight is not in the checkpoint"):
        pyrannc.load_checkpoint(tmp_path / "c", bigger)
    found = pyrannc.load_checkpoint(tmp_path / "c", bigger, strict=False)
    assert found.missing == ("more.weight", "more.bias")
    assert torch.equal(bigger.one.weight, run.inner.one.weight)
    with pytest.raises(CheckpointError, match="not in the model"):
        pyrannc.load_checkpoint(tmp_path / "c", nn.Linear(6, 6))
    with pytest.raises(CheckpointError, match="no state of scheduler"):
        run.load(tmp_path / "c")
    inner = Net().double()
    with pytest.raises(CheckpointError, match=r"AdamW, yours a torch\.optim\.sgd\.SGD"):
        pyrannc.load_checkpoint(tmp_path / "c", inner, torch.optim.SGD(inner.parameters()))
    groups = [{"params": [inner.one.weight]}, {"params": [inner.one.bias, inner.two.bias]}]
    with pytest.raises(CheckpointError, match="has 1 groups, yours 2"):
        pyrannc.load_checkpoint(tmp_path / "c", inner, torch.optim.AdamW(groups))
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        run.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        run.load(tmp_path / "empty")
    assert equal(run.values(), before)


def test_what_cannot_be_saved_is_told(tmp_path: Path) -> None:
    run = Run()
    run.step()
    place = tmp_path / "c"
    for extra, message in (
        ({"a": [1, torch.ones(1)]}, r"extra\['a'\]\[1\] is a torch.Tensor"),
        (np.float64(1), "extra is a numpy.float64"),
        ({(1, object()): 2}, "a key of extra"),
    ):
        with pytest.raises(UsageError, match=message):
            run.save(place, extra=extra)
    with pytest.raises(UsageError, match=r"step is 1\.5"):
        run.save(place, step=1.5)
    with pytest.raises(UsageError, match="scheduler is a int"):
        pyrannc.save_checkpoint(place, run.model, scheduler=3)
    other = torch.optim.SGD(run.inner.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="was not given to RaNNCModule"):
        pyrannc.save_checkpoint(place, run.model, other)
    run.scheduler.function = print  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"scheduler.*\['function'\]"):
        run.save(place)
    with pytest.raises(UsageError, match=r"torch\.nn\.Module, not of a int"):
        pyrannc.save_checkpoint(place, 3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_other_files_are_never_removed(tmp_path: Path) -> None:
    run = Run()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name in ("mine", "file"):
        with pytest.raises(CheckpointError, match=r"holds other files|not a folder"):
            run.save(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(CheckpointError, match="not a folder"):
        run.save(tmp_path / "link")
    with pytest.raises(CheckpointError, match="no checkpoint can be written"):
        run.save(tmp_path / "file" / "c")
    (tmp_path / "empty").mkdir()
    run.save(tmp_path / "empty", step=1)
    assert run.load(tmp_path / "empty").step == 1
    assert (tmp_path / "mine" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "precious"


def test_drafts_of_living_jobs_stay(tmp_path: Path) -> None:
    alive = atomic_folder.Draft(tmp_path / "theirs", "checkpoint.json")
    dead = atomic_folder.Draft(tmp_path / "gone", "checkpoint.json")
    os.close(dead._lock)
    Run().save(tmp_path / "mine")
    assert alive.folder.exists()
    assert not dead.folder.exists()
    alive.drop()


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """A limit on the size of files stands for it."""
    code = f"""
import resource, sys, torch, pyrannc
from rannd.errors import CheckpointError
model = torch.nn.Linear(100, 100)
pyrannc.save_checkpoint({str(tmp_path / "c")!r}, model, step=1)
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, {resource.RLIM_INFINITY}))
try:
    pyrannc.save_checkpoint({str(tmp_path / "c")!r}, model, step=2)
except CheckpointError as exc:
    assert "File too large" in str(exc), exc
    assert "the one before is as it was" in str(exc)
    assert pyrannc.load_checkpoint({str(tmp_path / "c")!r}, model).step == 1
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "told" in done.stdout, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_failed_sync_at_the_end_does_not_deny_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    run.save(tmp_path / "c", step=1)
    sync = atomic_folder.sync_folder

    def broken(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(folder)

    monkeypatch.setattr(atomic_folder, "sync_folder", broken)
    with pytest.raises(
        CheckpointError, match=r"is complete and in its place, but .* Input/output error: .* save again"
    ):
        run.save(tmp_path / "c", step=2)
    assert run.load(tmp_path / "c").step == 2


def test_an_index_of_any_python_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.0 to 3.11.3 writes members of enumerations by name."""
    run = Run(8)
    run.step()
    run.save(tmp_path / "by value")
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)), raising=False
    )
    run.save(tmp_path / "by name")
    assert b"getattr" in (tmp_path / "by name" / ".metadata").read_bytes()
    assert b"getattr" not in (tmp_path / "by value" / ".metadata").read_bytes() or sys.version_info[:3] < (3, 11, 4)
    first, second = (read_index(tmp_path / name).state_dict_metadata for name in ("by value", "by name"))
    assert first == second


class _Part:
    def __reduce__(self) -> tuple[object, ...]:
        return getattr, ("text", "upper")


def test_an_index_takes_parts_of_nothing_else(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Part()))
    with pytest.raises(CheckpointError, match="takes a part of what is no enumeration"):
        read_index(tmp_path)
