"""Folders of torch.distributed.checkpoint: of any sharding, read as torch reads them, and looked at before they are."""

from __future__ import annotations

import io
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rannd.errors import CheckpointError
from rannd.runtime.storage.dcp_metadata import read_index
from rannd.runtime.storage.dcp_reading import IndexedFolder, find

RANKS = 4
STATE = {
    "even": torch.randn(8, 4),
    "uneven": torch.randn(5, 7),
    "few": torch.randn(2, 3),
    "column": torch.randn(4, 8).t(),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "half": torch.randn(6, 6, dtype=torch.bfloat16),
    "whole": torch.arange(5),
}
VALUES = {"epoch": 3, "nested": {"a": [1, (2, None)], "b": {4: torch.ones(2)}}}


def _save_sharded(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    mesh = DeviceMesh("cpu", torch.arange(RANKS).reshape(2, 2))
    shardings: dict[str, list[Any]] = {
        "even": [Shard(0), Shard(1)],
        "uneven": [Shard(0), Shard(1)],
        "few": [Shard(0), Shard(0)],  # more ranks than rows
        "column": [Replicate(), Shard(1)],
        "empty": [Shard(0), Replicate()],
        "half": [Shard(1), Shard(1)],
    }
    state: dict[str, Any] = {
        name: distribute_tensor(value, mesh, shardings[name]) if name in shardings else value
        for name, value in STATE.items()
    }
    dcp.save({**state, **VALUES}, checkpoint_id=folder / "it")


def sharded(folder: Path) -> IndexedFolder:
    """What four ranks have saved, each its parts of the tensors."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                warnings.simplefilter("ignore")
                _save_sharded(rank, folder)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * RANKS
    return indexed(folder / "it")


def alone(folder: Path) -> IndexedFolder:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**STATE, **VALUES}, checkpoint_id=folder / "it", no_dist=True)
    return indexed(folder / "it")


def indexed(folder: Path) -> IndexedFolder:
    return IndexedFolder(folder, read_index(folder))


def targets() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, 7) for name, value in STATE.items()}


@pytest.mark.parametrize("save", [alone, sharded])
def test_any_sharding_is_read(tmp_path: Path, save: Callable[[Path], IndexedFolder]) -> None:
    folder = save(tmp_path)
    chunks = folder.tensor("uneven").chunks
    assert len(chunks) == (1 if save is alone else RANKS)
    into = targets()
    names = [name for name in folder.index.state_dict_metadata if name not in STATE and name != "nested.b.4"]
    found = find(folder, into, names)
    assert all(bool((value == 7).all()) for value in into.values())
    found.read()
    for name, value in STATE.items():
        assert torch.equal(into[name], value), name
    assert found.values["epoch"] == 3


def test_a_tensor_of_another_type_is_converted(tmp_path: Path) -> None:
    into = torch.empty(6, 6, dtype=torch.float64)
    find(alone(tmp_path), {"half": into}).read()
    assert torch.equal(into, STATE["half"].double())


def _place(folder: IndexedFolder, name: str) -> tuple[Path, int, int]:
    index = folder.index
    offset = index.state_dict_metadata[name].chunks[0].offsets  # type: ignore[union-attr]
    info = index.storage_data[MetadataIndex(name, offset)]
    return folder.path / info.relative_path, info.offset, info.length


def _put(folder: IndexedFolder, name: str, data: bytes) -> IndexedFolder:
    """Another archive in the place of a tensor."""
    path, _, length = _place(folder, name)
    whole: Any = pickle.loads((folder.path / ".metadata").read_bytes())  # noqa: S301 (made here)
    for key, info in whole.storage_data.items():
        if key.fqn == name:
            info.relative_path, info.offset, info.length = path.name, path.stat().st_size, max(length, len(data))
    with path.open("ab") as file:
        file.write(bytes(max(0, length - len(data))) + data)
    (folder.path / ".metadata").write_bytes(pickle.dumps(whole))
    return indexed(folder.path)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["EVIL"],))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: _saved(torch.ones(5)), r"even in .*__0_0\.distcp is damaged: it is \(5,\) there, and \(8, 4\)"),
        (lambda: _saved(torch.ones(8, 5)), r"it is \(8, 5\) there, and \(8, 4\) in the index"),
        (lambda: _saved([STATE["even"]]), "it is no tensor"),
        (lambda: _saved(Evil()), "it names posix.mkdir"),
        (lambda: b"", "it holds no archive"),
    ],
)
def test_what_is_in_the_place_of_a_tensor_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Callable[[], bytes], message: str
) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))
    folder = _put(alone(tmp_path), "even", data())
    with pytest.raises(CheckpointError, match=message):
        find(folder, targets())
    assert not (tmp_path / "evil").exists()


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    folder = alone(tmp_path)
    path, offset, length = _place(folder, "even")
    os.truncate(path, offset + length - 1)
    with pytest.raises(CheckpointError, match=rf"even in .* it ends at {offset + length}, the file at"):
        find(folder, {"even": torch.empty(8, 4)})


def test_a_file_of_another_size_than_was_written(tmp_path: Path) -> None:
    folder = alone(tmp_path)
    path = _place(folder, "even")[0]
    sizes = {path.name: path.stat().st_size}
    find(IndexedFolder(folder.path, folder.index, sizes), {"even": torch.empty(8, 4)})
    os.truncate(path, 4 << 40)
    with pytest.raises(CheckpointError, match="it was written with"):
        find(IndexedFolder(folder.path, folder.index, sizes), {"even": torch.empty(8, 4)})


def test_many_tensors_in_one_place(tmp_path: Path) -> None:
    """A small file would fill any memory."""
    folder = alone(tmp_path)
    whole: Any = pickle.loads((folder.path / ".metadata").read_bytes())  # noqa: S301 (made here)
    about, info = whole.state_dict_metadata["even"], next(v for k, v in whole.storage_data.items() if k.fqn == "even")
    for number in range(10**3):
        whole.state_dict_metadata[f"more{number}"] = about
        whole.storage_data[MetadataIndex(f"more{number}", torch.Size([0, 0]))] = info
    (folder.path / ".metadata").write_bytes(pickle.dumps(whole))
    with pytest.raises(CheckpointError, match="lie one over the other"):
        find(indexed(folder.path), {f"more{number}": torch.empty(8, 4) for number in range(10**3)})


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = alone(tmp_path)
    path = _place(folder, "even")[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        find(folder, {"even": torch.empty(8, 4)})
