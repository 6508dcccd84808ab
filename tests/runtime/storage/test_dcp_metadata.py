"""Hostile and damaged indexes: nothing runs, nothing changes, time and memory are in proportion to the file."""

from __future__ import annotations

import copyreg
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bounded import costs_little
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rannd.errors import CheckpointError
from rannd.runtime.storage import dcp_metadata
from rannd.runtime.storage.dcp_metadata import read_index

CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
HEAD, RECORD = b"\x80\x04", b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
DOUBLINGS = 60


class Call:
    """Pickled as a call of something with these arguments."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.parts = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def index(**changes: Any) -> Any:
    """An index of a tensor of 4 x 2 in two parts and of a value that is none, with some attributes changed."""
    parts = [ChunkStorageMetadata(torch.Size([n, 0]), torch.Size([2, 2])) for n in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([4, 2]), parts)
    files = {MetadataIndex("w", part.offsets): _StorageInfo(f"__{n}_0.distcp", n, 99) for n, part in enumerate(parts)}
    files[MetadataIndex("n")] = _StorageInfo("__0_0.distcp", 99, 5)
    made: Any = Metadata({"w": tensor, "n": BytesStorageMetadata()}, storage_data=files)
    for name, value in changes.items():
        if name in ("chunks", "size", "properties"):
            setattr(tensor, name, value)
        elif name in ("offsets", "sizes"):
            setattr(parts[0], name, value)
        elif name == "parts_length":
            object.__setattr__(files[MetadataIndex("w", parts[0].offsets)], "length", value)
        elif name in ("relative_path", "offset", "length", "transform_descriptors"):
            object.__setattr__(files[MetadataIndex("n")], name, value)
        else:
            setattr(made, name, value)
    return made


def write(folder: Path, data: bytes) -> Path:
    (folder / ".metadata").write_bytes(data)
    return folder


def used(index: Metadata) -> dict[str, Any]:
    """What is read of an index; torch also writes properties that tensors had where they were saved."""
    found: dict[str, Any] = {}
    for name, value in index.state_dict_metadata.items():
        tensor = isinstance(value, TensorStorageMetadata)
        found[name] = (value.properties.dtype, value.size, value.chunks) if tensor else value
    return found


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_index_is_read_as_torch_reads_it(tmp_path: Path, protocol: int) -> None:
    found = read_index(write(tmp_path, pickle.dumps(index(), protocol=protocol)))
    assert found.state_dict_metadata == index().state_dict_metadata
    assert found.storage_data == index().storage_data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": {"b": torch.ones(3, 0), "c": [torch.ones(()), 5]}}, checkpoint_id=tmp_path / "torch")
    wanted: Any = pickle.loads((tmp_path / "torch" / ".metadata").read_bytes())  # noqa: S301 (made here)
    found = read_index(tmp_path / "torch")
    assert used(found) == used(wanted)
    assert found.storage_data == wanted.storage_data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"N\x82\x01.", "holds a EXT1"),
        (b"N\x83\x01\0.", "holds a EXT2"),
        (b"N\x84\x01\0\0\0.", "holds a EXT4"),
        (b"Pname\n.", "holds a PERSID"),
        (b"NQ.", "holds a BINPERSID"),
        (b"(N" + b"ios\nsystem\n.", "holds a INST"),
        (b"(" + RECORD + b"No.", "holds a OBJ"),
        (RECORD + b")}\x92.", "holds a NEWOBJ_EX"),
        (b"N2.", "holds a DUP"),
        (b"N0.", "holds a POP"),
        (b"(\x91.", "holds a FROZENSET"),
        (b"C\x01x.", "holds a SHORT_BINBYTES"),
        (b"\x96" + bytes([1, 0, 0, 0, 0, 0, 0, 0]) + b"x.", "holds a BYTEARRAY8"),
        (b"\x8b\x01\0\0\0\1.", "holds a LONG4"),
        (b"\x97.", "holds a NEXT_BUFFER"),
        (b"I1\n.", "holds a INT"),
        (b"S'x'\n.", "holds a STRING"),
        (b"cbuiltins\neval\n(Vx\ntR.", "names builtins.eval"),
        (b"cos\nsystem\n.", "names os.system"),
        (b"cbuiltins\ngetattr\n" + RECORD + b"\x8c\x08__init__\x86R.", "state_dict_metadata"),
        (b"c__builtin__\ngetattr\n(ctorch\nfloat32\n\x8c\x01xtR.", "takes a part of what is no enumeration"),
        (b"cbuiltins\ngetattr\n(ctorch\nfloat32\n\x8c\x01xtR.", "takes a part of what is no enumeration"),
        (b"cbuiltins\ngetattr\n\x8c\x01x\x8c\x05upper\x86R.", "takes a part of what is no enumeration"),
        (b"K\x01\x8c\x01x\x93.", "there is a int in the place of a string"),
        (b"\x8c\x01x]\x93.", "there is a list in the place of a string"),
        (b"\x8c\x02os\x8c\x06system\x93.", "names os.system"),
        (b"\x8c\x05torch\x8c\x0fos.path.getsize\x93.", "names torch.os.path.getsize"),
        (b"\x8c\x05torch\x8c\x0eSize.__class__\x93.", "names torch.Size.__class__"),
        (b"\x8c\x01x)R.", "makes something of what is no name"),
        (RECORD + b")R)R.", "makes something of what is no name"),
        (RECORD + b"K\x01R.", "makes something of what is no name"),
        (RECORD + b"}\x8c\x01xK\x01sb.", "gives attributes to what is no record"),  # to the class, that is
        (RECORD + b"N}\x8c\x01xK\x01s\x86b.", "gives attributes to what is no record"),
        (b"ctorch\nSize\n}b.", "gives attributes to what is no record"),
        (b"]}b.", "gives attributes to what is no record"),
        (RECORD + b")\x81N}\x8c\x01xK\x01s\x86b.", "puts items into what is no dict"),  # state for slots
        (RECORD + b")\x81}\x8c\x0c__setstate__K\x01sb.", "state_dict_metadata"),
        (RECORD + b")\x81\x8c\x01xb.", "puts items into what is no dict"),
        (b"}K\x01K\x01s.", "a key that is neither a string nor a record"),
        (b"})K\x01s.", "a key that is neither a string nor a record"),
        (b"}(\x8c\x01xK\x01ctorch\nSize\nK\x01u.", "a key that is neither a string nor a record"),
        (b"}(\x8c\x01xu.", "argument 2 is shorter"),
        (b")K\x01a.", "appends to what is no list"),
        (b"]\x8c\x01xK\x01s.", "puts items into what is no dict"),
        (b"a.", "pop from empty list"),
        (b"t.", "pop from empty list"),
        (b"h\x07.", "7"),
        (b".", "pop from empty list"),
        (b"N", "exhausted|too early"),
    ],
)
def test_opcodes_that_an_index_does_not_have(tmp_path: Path, data: bytes, message: str) -> None:
    before = [dict(vars(each)) for each in CLASSES]
    with pytest.raises(CheckpointError, match=rf"damaged, or not one: .*({message})"):
        read_index(write(tmp_path, HEAD + data))
    assert [dict(vars(each)) for each in CLASSES] == before


def test_the_extension_registry_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copyreg.add_extension("os", "mkdir", 200)
    try:
        with pytest.raises(CheckpointError, match="holds a EXT1"):
            read_index(write(tmp_path, HEAD + b"\x82\xc8(\x8c\x03rantR."))
    finally:
        copyreg.remove_extension("os", "mkdir", 200)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": torch.Size([3, 2])}, "a part of a tensor is not inside of it"),
        ({"size": torch.Size([4])}, "another number of dimensions"),
        ({"sizes": torch.Size([2, 3])}, "a part of a tensor is not inside of it"),
        ({"offsets": torch.Size([1 << 62, 0])}, "a part of a tensor is not inside of it"),
        ({"offsets": torch.Size([0])}, "another number of dimensions"),
        ({"size": Call(torch.Size, [-1, 2])}, "in the place of a size or an offset"),
        ({"size": Call(torch.Size, [1 << 63, 2])}, "in the place of a size or an offset"),
        ({"size": Call(torch.Size, [1 << 2000, 2])}, "in the place of a size or an offset"),
        ({"size": Call(torch.Size, [True, 2])}, "in the place of a size or an offset"),
        ({"size": Call(torch.Size, ["4", 2])}, "in the place of a size or an offset"),
        ({"size": Call(torch.Size, "42")}, "no list of up to 64 numbers"),
        ({"size": Call(torch.Size, [1] * 65)}, "no list of up to 64 numbers"),
        ({"size": Call(torch.Size)}, "not enough values"),
        ({"size": (4, 2)}, "something else than a size"),
        ({"chunks": {}}, "appends to what is no list"),
        ({"chunks": [torch.Size([1])]}, "something else than a metadata.ChunkStorageMetadata"),
        ({"properties": torch.Size([1])}, "a tensor has no properties"),
        ({"properties": Call(TensorProperties)}, "not subscriptable"),
        ({"relative_path": "/etc/passwd"}, "points out of its folder"),
        ({"relative_path": "a/../../b"}, "points out of its folder"),
        ({"relative_path": "sub/__0_0.distcp"}, "points out of its folder"),
        ({"relative_path": ".."}, "points out of its folder"),
        ({"relative_path": ""}, "points out of its folder"),
        ({"relative_path": "a\0"}, "points out of its folder"),
        ({"size": torch.Size([5, 2])}, "w is not whole: its parts leave a hole or overlap"),
        ({"chunks": []}, "w is not whole"),
        ({"offsets": torch.Size([2, 0])}, "w is not whole"),
        ({"sizes": torch.Size([1, 2])}, "w is not whole"),
        ({"sizes": torch.Size([3, 2])}, "w is not whole"),
        ({"offsets": torch.Size([1, 0])}, r"no place for the part of w at \(1, 0\)"),
        ({"parts_length": 15}, "gives a part of w fewer bytes than its elements need"),
        ({"relative_path": "a" * 5000}, "a path of 5000 characters"),
        ({"relative_path": 5}, "a int in the place of a string"),
        ({"relative_path": "\ud800"}, "surrogates not allowed"),
        ({"transform_descriptors": ["zstd"]}, "stored in a transformed way"),
        ({"offset": -1}, "in the place of a size or an offset"),
        ({"length": 1.5}, "in the place of a size or an offset"),
        ({"storage_data": {MetadataIndex("x"): _StorageInfo("a", 0, 1)}}, "a place for x, but no description"),
        ({"storage_data": {"w": _StorageInfo("a", 0, 1)}}, "something else than a metadata.MetadataIndex"),
        ({"storage_data": {MetadataIndex("w"): "a"}}, "something else than a filesystem._StorageInfo"),
        ({"storage_data": []}, "no dict"),
        ({"storage_data": None}, "no dict"),
        ({"state_dict_metadata": {"w": torch.Size([1])}}, "something else than a metadata.TensorStorageMetadata"),
        ({"state_dict_metadata": {"\udfff": BytesStorageMetadata()}}, "surrogates not allowed"),
    ],
)
def test_values_that_an_index_cannot_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = pickle._dumps(index(**changes))  # in Python: it also writes what is no unicode text
    with pytest.raises(CheckpointError, match=rf"damaged, or not one: .*{message}") as raised:
        read_index(write(tmp_path, data))
    str(raised.value).encode()  # it travels between ranks


def doubled(start: bytes = b"K\x01") -> bytes:
    """A tuple that holds one tuple twice, which holds one twice, and so on."""
    return start + b"".join(b"q%ch%c\x86" % (place, place) for place in range(DOUBLINGS))


def many(count: int, length: int) -> Any:
    """Sizes made of one list: of what a small file says comes a lot."""
    shared = [1] * length
    return index(planner_data=[Call(torch.Size, shared) for _ in range(count)])


def shared_parts(count: int, length: int) -> Any:
    part = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    chunks = [part] * length
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([1]), chunks)
    return index(state_dict_metadata={str(number): tensor for number in range(count)}, storage_data={})


def shared_path(count: int, length: int) -> Any:
    info = "a/" * length
    places = {MetadataIndex("w", torch.Size([number, 0])): _StorageInfo(info, 0, 1) for number in range(count)}
    return index(storage_data=places)


BOMBS: dict[str, Callable[[], bytes]] = {
    "a key that takes long to hash": lambda: HEAD + b"}" + doubled() + b"Ns.",
    "keys in a row": lambda: HEAD + b"}(" + doubled() + b"Nu.",
    "a name that takes long to print": lambda: HEAD + doubled() + b"\x8c\x01x\x93.",
    "a class that takes long to print": lambda: HEAD + b"\x8c\x01x" + doubled() + b"\x93.",
    "a place that takes long to print": lambda: (
        HEAD
        + RECORD
        + b")\x81}(\x8c\x13state_dict_metadata}\x8c\x0cstorage_data}"
        + b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n)\x81}\x8c\x03fqn\x8c\x01wsb"
        + b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n)\x81}(\x8c\x0drelative_path\x8c\x01a"
        + b"\x8c\x06length\x4b\x01\x8c\x06offset"
        + doubled()
        + b"ubsub."
    ),
    "a number that takes long to print": lambda: HEAD + b"\x8b" + (10**7).to_bytes(4, "little") + b"\1" * 10**7 + b".",
    "digits": lambda: HEAD + b"L" + b"9" * 10**7 + b"L\n.",
    "a large memo": lambda: HEAD + b"Nr" + b"\xff" * 4 + b".",
    "a length that is not there": lambda: HEAD + b"\x8d" + (1 << 40).to_bytes(8, "little") + b"x",
    "bytes that are not there": lambda: HEAD + b"\x96" + (1 << 40).to_bytes(8, "little") + b"x",
    "a frame that is not there": lambda: HEAD + b"\x95" + (1 << 40).to_bytes(8, "little") + b".",
    "lists in lists": lambda: HEAD + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",
    "tuples in tuples": lambda: HEAD + b")" + b"\x85" * 10**5 + b".",
    "records in records": lambda: (
        HEAD + RECORD + b"\x94" + b")" + b"h\0)\x81}\x8c\x01x" * 10**5 + b"Nsb" * 10**5 + b"."
    ),
    "marks": lambda: HEAD + b"(" * 10**5 + b"t" * 10**5 + b".",
    "many sizes of one list": lambda: pickle.dumps(many(10**5, 10**5)),
    "many tensors of one list of parts": lambda: pickle.dumps(shared_parts(10**4, 10**5)),
    "many places of one path": lambda: pickle.dumps(shared_path(10**4, 10**6)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_costs_little(tmp_path: Path, name: str) -> None:
    """Within a minute of computing and a GiB of memory; without the limits some of these would never end."""
    write(tmp_path, BOMBS[name]())

    def refuse() -> None:
        with pytest.raises(CheckpointError, match="damaged, or not one") as caught:
            read_index(tmp_path)
        assert len(str(caught.value)) < 2000

    assert costs_little(refuse)


def test_what_is_no_file_of_a_likely_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_metadata, "LARGEST", 1000)
    write(tmp_path, b"x" * 1001)
    with pytest.raises(CheckpointError, match="has 1001 bytes, more than 1000"):
        read_index(tmp_path)
    (tmp_path / ".metadata").unlink()
    (tmp_path / ".metadata").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"\.metadata is a symbolic link to /dev/zero"):
        read_index(tmp_path)
    (tmp_path / ".metadata").unlink()
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata is damaged: it is not a regular file"):
        read_index(tmp_path)


WHOLE = pickle.dumps(index())


@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4), st.data())
def test_damage_is_told_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, bytes_: list[tuple[int, int]], cut: st.DataObject
) -> None:
    data = bytearray(WHOLE)
    for place, value in bytes_:
        data[place] = value
    end = cut.draw(st.integers(0, len(data))) if cut.draw(st.booleans()) else len(data)
    folder = write(tmp_path_factory.getbasetemp(), bytes(data[:end]))
    try:
        found = read_index(folder)
    except CheckpointError as exc:
        str(exc).encode()
        return
    for name, each in found.state_dict_metadata.items():
        assert type(name) is str
        assert type(each) in (BytesStorageMetadata, TensorStorageMetadata)
    for place, info in found.storage_data.items():
        assert place.fqn in found.state_dict_metadata
        assert "/" not in info.relative_path
        assert info.offset >= 0 <= info.length


def test_every_beginning_of_an_index_is_damaged(tmp_path: Path) -> None:
    for end in range(len(WHOLE)):
        with pytest.raises(CheckpointError, match="damaged, or not one"):
            read_index(write(tmp_path, WHOLE[:end]))
