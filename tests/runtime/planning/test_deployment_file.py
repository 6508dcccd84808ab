"""Files of deployments: whole or not at all, never through links; and what is said when one is used."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from plan_graphs import chain
from plan_instances import deploy
from torch import nn

import pyrannc
from rannd.errors import DeploymentError, UsageError
from rannd.plan.deployment import MAX_BYTES, Deployment, Provenance, decode, encode
from rannd.runtime.planning.deployment_file import read_file, save_file


@pytest.fixture
def some() -> Deployment:
    return deploy(chain(10), 2)


def test_what_is_saved_is_read_and_nothing_else_is_left(tmp_path: Path, some: Deployment) -> None:
    file = tmp_path / "plan"
    save_file(some, file)
    assert decode(read_file(file)) == some
    other = msgspec.structs.replace(some, batch_rows=7)
    save_file(other, file)
    assert decode(read_file(file)) == other
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]
    assert not stat.S_IMODE(file.stat().st_mode) & (stat.S_IWOTH | stat.S_IWGRP | stat.S_IXUSR)


def test_a_tilde_is_the_home_for_both_ways(tmp_path: Path, some: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_file(some, Path("~/plan"))
    assert (tmp_path / "plan").exists()
    assert decode(read_file(Path("~/plan"))) == some


def test_readers_see_one_or_the_other_never_half(tmp_path: Path, some: Deployment) -> None:
    file = tmp_path / "plan"
    plans = [msgspec.structs.replace(some, batch_rows=rows) for rows in (7, 8)]
    save_file(plans[0], file)
    done = threading.Event()

    def write() -> None:
        for turn in range(50):
            save_file(plans[turn % 2], file)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert decode(read_file(file)) in plans
    writer.join()


def test_links_are_neither_written_nor_read_through(tmp_path: Path, some: Deployment) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"mine")
    link.symlink_to(real)
    with pytest.raises(DeploymentError, match=f"not written to {link}, a symbolic link to {real}; name the file"):
        save_file(some, link)
    with pytest.raises(DeploymentError, match=f"{link} is a symbolic link to {real}; name the file itself"):
        read_file(link)
    assert real.read_bytes() == b"mine"
    link.unlink()
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(DeploymentError, match="symbolic link"):
        save_file(some, link)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
    # A link to the folder is the user's own way there.
    (tmp_path / "folder").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "folder")
    save_file(some, tmp_path / "way" / "plan")
    assert decode(read_file(tmp_path / "way" / "plan")) == some


def test_what_is_no_file_of_a_deployment_is_refused(tmp_path: Path, some: Deployment) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(DeploymentError, match="is not a regular file"):
            read_file(path)
    with pytest.raises(DeploymentError, match="cannot be read: No such file"):
        read_file(tmp_path / "none")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(DeploymentError, match=f"has {MAX_BYTES + 1} bytes, more than"):
        read_file(large)
    anybody = tmp_path / "anybody"
    save_file(some, anybody)
    anybody.chmod(0o666)
    with pytest.raises(DeploymentError, match=r"is writable for every user .*chmod o-w"):
        read_file(anybody)
    anybody.chmod(0o644)
    assert decode(read_file(anybody)) == some


def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path, some: Deployment) -> None:
    (tmp_path / "folder").mkdir()
    for file in (tmp_path / "folder", tmp_path / "none" / "plan", tmp_path / ("x" * 300)):
        with pytest.raises(DeploymentError, match="cannot be written to"):
            save_file(some, file)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert not list((tmp_path / "folder").iterdir())


# -- shown ----------------------------------------------------------------------------------------------------


def test_a_file_is_shown(tmp_path: Path, some: Deployment, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan"
    save_file(some, file)
    pyrannc.show_deployment(file)
    assert "batch     128 rows: 2 ranks" in capsys.readouterr().out
    pyrannc.show_deployment(str(file), 256)
    assert "rough estimate: planned for 128 rows" in capsys.readouterr().out
    for wrong in (0, "64", 2.5, True):
        with pytest.raises(UsageError, match=f"a batch of {wrong!r} rows"):
            pyrannc.show_deployment(file, wrong)  # type: ignore[arg-type]
    file.write_bytes(encode(some)[:-3])
    with pytest.raises(DeploymentError, match=f"{file}: not a deployment"):
        pyrannc.show_deployment(file, 64)


def test_of_several_ranks_the_first_prints(tmp_path: Path, some: Deployment) -> None:
    file = tmp_path / "plan"
    save_file(some, file)
    script = f"import pyrannc; pyrannc.show_deployment({str(file)!r}, 64)"
    environ = {**os.environ, "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script], env={**environ, "RANK": rank}, capture_output=True, text=True, check=True
        ).stdout
        for rank in "01"
    ]
    assert outputs[0].startswith("plan      1 stage: the whole model on devices 0:0-1; ")
    assert outputs[1] == ""


# -- used -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_what_it_was_not_planned_for_is_told(
    tmp_path: Path, daemon_home: object, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan"
    model = pyrannc.RaNNCModule(Net())
    model(torch.randn(3, 6))
    made = model.deployment.made
    assert made is not None
    assert (made.costs, made.torch) == ("measured", torch.__version__)
    model.save_deployment(file)
    capfd.readouterr()
    pyrannc.RaNNCModule(Net(), load_deployment=file)(torch.randn(3, 6))
    assert "is used although" not in "".join(capfd.readouterr())
    other = msgspec.structs.replace(model.deployment, made=Provenance("A100", "cluster a100x8", "0.0.9", made.torch))
    save_file(other, file)
    pyrannc.RaNNCModule(Net(), load_deployment=file)(torch.randn(5, 6))
    told = "".join(capfd.readouterr())
    for words in (
        "planned for a global batch of 3 rows, this call has 5",
        "planned for the device 'A100', this job has 'cpu",
        "its times are from cluster a100x8, not measured",
        "planned with rannd 0.0.9, this is",
    ):
        assert f"The deployment in {file} is used although" in told
        assert words in told
    assert "planned with torch" not in told


def test_what_makes_it_wrong_is_an_error(tmp_path: Path, daemon_home: object) -> None:
    file = tmp_path / "plan"
    model = pyrannc.RaNNCModule(Net())
    model(torch.randn(3, 6))
    for change, message in (
        ({"graph_hash": "other"}, "made for the graph other, this model's is"),
        ({"schedule": "zigzag"}, "runs the schedule 'zigzag', this version of rannd supports"),
        ({"microbatches": 10**9, "batch_rows": 10**9}, "1000000000 microbatches on 1 slots are more than 1048576"),
        (
            {"microbatches": 10**5, "batch_rows": 10**5},
            "has 100000 microbatches, but the batch of this call has 3 rows",
        ),
    ):
        save_file(msgspec.structs.replace(model.deployment, **change), file)
        with pytest.raises(DeploymentError, match=f"{file}: .*{message}"):
            pyrannc.RaNNCModule(Net(), load_deployment=file)(torch.randn(3, 6))
    stage = model.deployment.stages[0]
    wrong = msgspec.structs.replace(stage, ops=("9:nothing", *stage.ops[1:]))
    save_file(msgspec.structs.replace(model.deployment, stages=(wrong,)), file)
    with pytest.raises(DeploymentError, match="places op 9:nothing, which this model's graph does not have"):
        pyrannc.RaNNCModule(Net(), load_deployment=file)(torch.randn(3, 6))


def test_arguments_by_place_and_by_name(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * scale

    file, x = tmp_path / "plan", torch.randn(3, 6)
    model = pyrannc.RaNNCModule(Two())
    model(x, x)
    model.save_deployment(file)
    pyrannc.RaNNCModule(Two(), load_deployment=file)(x, scale=x)
    with pytest.raises(DeploymentError, match=r"tensors in another order \(those .* by keyword come last"):
        pyrannc.RaNNCModule(Two(), load_deployment=file)(x=x, scale=x)
