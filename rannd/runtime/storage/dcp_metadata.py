"""The index of a torch.distributed.checkpoint folder, ``.metadata``, read as data.

torch pickles it, and reads it with ``pickle.load``, which runs what the file says. Here its opcodes are read with
``pickletools`` and put together by hand: lists, dicts, numbers, texts, and records of a few known names. Nothing that
the file names is looked up or called. (Opcodes: the documentation of Python's ``pickletools``.)
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
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
from rannd.runtime.storage.atomic_folder import METADATA

_HOME = "torch.distributed.checkpoint."
_MEMBER = "builtins.getattr"
"""How Python 3.11.0 to 3.11.3 writes a member of an enumeration: by the name of its class and its own."""
_RECORDS = {
    f"{_HOME}metadata.{name}"
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    f"{_HOME}filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "pathlib._local.PosixPath",
}
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_MARK = object()


@dataclass(frozen=True)
class _Name:
    text: str


@dataclass(eq=False)
class _Record:
    """What the file says of an object: its class, what it is made of, what it has."""

    name: str
    made_of: tuple[Any, ...]
    has: Any = None


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint's folder. CheckpointError where there is none, or it holds what an index cannot."""
    path = folder / METADATA
    try:
        data = path.read_bytes()
    except FileNotFoundError as exc:
        raise CheckpointError(f"{folder} is no checkpoint: it has no file {METADATA}") from exc
    except OSError as exc:
        raise CheckpointError(f"the checkpoint's index {path} cannot be read: {exc.strerror}") from exc
    try:
        return _metadata(_parse(data))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, UnicodeDecodeError) as exc:
        raise CheckpointError(f"the checkpoint's index {path} is damaged, or not one: {exc}") from exc


def _parse(data: bytes) -> Any:
    """The value that a pickle describes."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def to_mark() -> list[Any]:
        place = len(stack) - 1 - next(n for n, each in enumerate(reversed(stack)) if each is _MARK)
        found = stack[place + 1 :]
        del stack[place:]
        return found

    try:
        for op, found, _ in pickletools.genops(data):
            arg: Any = found
            match op.name:
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    return stack.pop()
                case "MARK":
                    stack.append(_MARK)
                case "NONE":
                    stack.append(None)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(op.name == "NEWTRUE")
                case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                    stack.append(arg)
                case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                    stack.append(arg)
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_TUPLE":
                    stack.append(())
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    count = int(op.name[-1])
                    items = tuple(stack[-count:])
                    del stack[-count:]
                    stack.append(items)
                case "TUPLE":
                    stack.append(tuple(to_mark()))
                case "APPEND":
                    value = stack.pop()
                    _list(stack[-1]).append(value)
                case "APPENDS":
                    values = to_mark()
                    _list(stack[-1]).extend(values)
                case "SETITEM":
                    value, key = stack.pop(), stack.pop()
                    _dict(stack[-1])[key] = value
                case "SETITEMS":
                    values = to_mark()
                    _dict(stack[-1]).update(zip(values[::2], values[1::2], strict=True))
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINPUT" | "LONG_BINPUT":
                    memo[arg] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[arg])
                case "GLOBAL":
                    stack.append(_known(".".join(arg.split(" "))))
                case "STACK_GLOBAL":
                    name, module = stack.pop(), stack.pop()
                    stack.append(_known(f"{module}.{name}"))
                case "REDUCE" | "NEWOBJ":
                    made_of, name = stack.pop(), stack.pop()
                    stack.append(_made(name, made_of))
                case "BUILD":
                    has = stack.pop()
                    if not isinstance(stack[-1], _Record):
                        raise ValueError("it gives attributes to what is no record")
                    stack[-1].has = has
                case _:
                    raise ValueError(f"it holds a {op.name}, which an index has not")
    except StopIteration as exc:
        raise ValueError("a list in it has no start") from exc
    raise ValueError("it ends too early")


def _known(name: str) -> _Name:
    if name not in _RECORDS and name not in _DTYPES and name != _MEMBER:
        raise ValueError(f"it names {name}, which an index does not")
    return _Name(name)


def _made(name: Any, made_of: Any) -> Any:
    if not isinstance(name, _Name) or not isinstance(made_of, tuple):
        raise ValueError("it makes something of what is no name")
    if name.text == _MEMBER:
        of, member = made_of
        if not isinstance(of, _Name) or of.text not in _RECORDS:
            raise ValueError("it takes a part of what is no enumeration")
        return _Record(of.text, (_text(member),))
    if name.text == "torch.Size":
        return torch.Size([int(each) for each in made_of[0]])
    if name.text == "collections.OrderedDict":
        return {}
    return _Record(name.text, made_of)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("it appends to what is no list")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("it puts items into what is no dict")
    return value


# -- torch's classes, made from what was read -----------------------------------------------------------------


def _metadata(value: Any) -> Metadata:
    has = _of(value, "metadata.Metadata")
    tensors: dict[str, Any] = {}
    for name, each in _dict(has["state_dict_metadata"]).items():
        tensors[_text(name)] = _storage_type(each)
    storage = {_index(key): _info(info) for key, info in _dict(has["storage_data"]).items()}
    for index in storage:
        if index.fqn not in tensors:
            raise ValueError(f"it has a place for {index.fqn}, but no description")
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


def _of(value: Any, name: str) -> dict[str, Any]:
    """What a record of a class has."""
    if not isinstance(value, _Record) or value.name != f"{_HOME}{name}":
        raise ValueError(f"there is something else than a {name}")
    return _dict(value.has if value.has is not None else {})


def _storage_type(value: Any) -> Any:
    if isinstance(value, _Record) and value.name == f"{_HOME}metadata.BytesStorageMetadata":
        return BytesStorageMetadata()
    has = _of(value, "metadata.TensorStorageMetadata")
    properties = has["properties"]
    if not isinstance(properties, _Record) or properties.name != f"{_HOME}metadata.TensorProperties":
        raise ValueError("a tensor has no properties")
    dtype = properties.has[0]
    if not isinstance(dtype, _Name) or dtype.text not in _DTYPES:
        raise ValueError("a tensor has no type")
    chunks = []
    for chunk in _list(has["chunks"]):
        of = _of(chunk, "metadata.ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_size(of["offsets"]), _size(of["sizes"])))
    return TensorStorageMetadata(TensorProperties(dtype=_DTYPES[dtype.text]), _size(has["size"]), chunks)


def _index(value: Any) -> MetadataIndex:
    has = _of(value, "metadata.MetadataIndex")
    offset = has.get("offset")
    return MetadataIndex(_text(has["fqn"]), None if offset is None else _size(offset))


def _info(value: Any) -> _StorageInfo:
    has = _of(value, "filesystem._StorageInfo")
    path = PurePosixPath(_text(has["relative_path"]))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"it points out of its folder, to {path}")
    if has.get("transform_descriptors"):
        raise ValueError("its tensors are stored in a transformed way, which is not supported")
    offset, length = has["offset"], has["length"]
    if not all(isinstance(each, int) and each >= 0 for each in (offset, length)):
        raise ValueError(f"{path} has no place at {offset} of length {length}")
    return _StorageInfo(str(path), offset, length)


def _size(value: Any) -> torch.Size:
    if not isinstance(value, torch.Size):
        raise ValueError("there is something else than a size")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"there is a {type(value).__name__} in the place of a text")
    return value
