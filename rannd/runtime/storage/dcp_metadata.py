"""The index of a torch.distributed.checkpoint folder, ``.metadata``: a pickle, read here without unpickling.

torch reads it with ``pickle.load``, which calls what the file names. Here ``pickletools`` reads the opcodes, and a
small stack machine makes lists, dicts, numbers, strings, and records of a few known names of them. Nothing that the
file names is imported or called. torch's classes are made from the records at the end, every value checked.

``pickle.Unpickler`` with a `find_class` that returns only known classes would be shorter, but checks too little:

- It hashes any dict key. A tuple that holds one tuple twice, which holds one twice, and so on, takes exponential time
  to hash: a file of 127 bytes never ends. A look at the opcodes beforehand does not tell what becomes a key.
- The file says how large the memo is: 9 bytes take 4 GiB (LONG_BINPUT in Python 3.11).
- BUILD sets attributes of whatever is on the stack, also of the classes that `find_class` has returned.

So keys, names, sizes and amounts are checked here where they arise. Time and memory are in proportion to the file.
"""

from __future__ import annotations

import pickletools
import stat
from dataclasses import dataclass
from pathlib import Path
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
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}

LARGEST = 1 << 30
"""Bytes of an index: some ten million parts of tensors."""
_DIMENSIONS = 64
_PATH = 4096


@dataclass(frozen=True)
class _Name:
    text: str


@dataclass(eq=False)
class _Record:
    """What the file says of an object: its class, the arguments it is made of, the state it is given."""

    name: str
    made_of: tuple[Any, ...]
    has: Any = None


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint's folder. CheckpointError where there is none, or it holds what an index cannot."""
    path = folder / METADATA
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST:
            raise CheckpointError(f"the checkpoint's index {path} is no file of up to {LARGEST} bytes")
        data = path.read_bytes()
    except FileNotFoundError as exc:
        raise CheckpointError(f"{folder} is no checkpoint: it has no file {METADATA}") from exc
    except OSError as exc:
        raise CheckpointError(f"the checkpoint's index {path} cannot be read: {exc.strerror}") from exc
    try:
        return _metadata(_parse(data), len(data))
    except (ValueError, TypeError, LookupError, AttributeError) as exc:
        raise CheckpointError(f"the checkpoint's index {path} is damaged, or not one: {exc}") from exc


def _parse(data: bytes) -> Any:
    """The value that a pickle describes. (Opcodes: the documentation of Python's ``pickletools``.)"""
    stack: list[Any] = []
    below: list[list[Any]] = []  # what was on the stack before each mark
    memo: dict[int, Any] = {}
    for op, found, _ in pickletools.genops(data):
        arg: Any = found
        match op.name:  # the frequent ones first: these are compared one after the other
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[arg])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(arg)
            case "MARK":
                below.append(stack)
                stack = []
            case "REDUCE" | "NEWOBJ":
                made_of, name = stack.pop(), stack.pop()
                stack.append(_made(name, made_of))
            case "BUILD":
                has = stack.pop()
                if not isinstance(stack[-1], _Record):
                    raise ValueError("it gives attributes to what is no record")
                stack[-1].has = has
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append(_EMPTY[op.name]())
            case "SETITEMS":
                items, stack = stack, below.pop()
                _set_items(stack[-1], items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(op.name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "SHORT_BINUNICODE" | "BINUNICODE" | "BINUNICODE8":
                arg.encode()  # half of a surrogate pair could not be printed in a message
                stack.append(arg)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(_CONSTANTS[op.name])
            case "TUPLE":
                items, stack = stack, below.pop()
                stack.append(tuple(items))
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                _set_items(stack[-1], [key, value])
            case "APPEND":
                items = [stack.pop()]
                _list(stack[-1]).extend(items)
            case "APPENDS":
                items, stack = stack, below.pop()
                _list(stack[-1]).extend(items)
            case "BINPUT" | "LONG_BINPUT":
                memo[arg] = stack[-1]
            case "GLOBAL":
                module, name = arg.split(" ", 1)
                # As Python before 3.11.4 names it for protocols up to 2, for members of enumerations.
                stack.append(_known("builtins" if module == "__builtin__" else module, name))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                stack.append(_known(module, name))
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack.pop()
            case _:
                raise ValueError(f"it holds a {op.name}, which an index has not")
    raise ValueError("it ends too early")


def _known(module: Any, name: Any) -> _Name:
    full = f"{_text(module)}.{_text(name)}"
    if full not in _RECORDS and full not in _DTYPES and full != _MEMBER:
        raise ValueError(f"it names {full[:200]}, which an index does not")
    return _Name(full)


def _made(name: Any, made_of: Any) -> Any:
    if not isinstance(name, _Name) or not isinstance(made_of, tuple):
        raise ValueError("it makes something of what is no name")
    if name.text == _MEMBER:
        of, member = made_of
        if not isinstance(of, _Name) or of.text not in _RECORDS:
            raise ValueError("it takes a part of what is no enumeration")
        return _Record(of.text, (_text(member),))
    if name.text == "torch.Size":
        (numbers,) = made_of
        if not isinstance(numbers, (list, tuple)) or len(numbers) > _DIMENSIONS:
            raise ValueError(f"it has a size that is no list of up to {_DIMENSIONS} numbers")
        return torch.Size([_number(each) for each in numbers])
    if name.text == "collections.OrderedDict":
        return {}
    return _Record(name.text, made_of)


def _set_items(value: Any, items: list[Any]) -> None:
    """Put keys and values, in turn, into a dict. No key can be made to take long to hash, or hash like others."""
    if not all(isinstance(key, (str, _Record)) for key in items[::2]):
        raise ValueError("it has a key that is neither a string nor a record")
    _dict(value).update(zip(items[::2], items[1::2], strict=True))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("it appends to what is no list")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("it puts items into what is no dict")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"there is a {type(value).__name__} in the place of a string")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError("there is something else in the place of a size or an offset")
    return value


# -- torch's classes, made from what was read -----------------------------------------------------------------


def _metadata(value: Any, length: int) -> Metadata:
    """The index that a pickle of `length` bytes describes."""
    has = _of(value, "metadata.Metadata")
    described = _dict(has["state_dict_metadata"])
    if sum(len(_chunks(each)) for each in described.values()) > length:  # one list may stand in many places
        raise ValueError("it has more parts of tensors than it has bytes")
    tensors: dict[str, Any] = {_text(name): _storage_type(each) for name, each in described.items()}
    storage = {_index(key): _info(info) for key, info in _dict(has["storage_data"]).items()}
    for index in storage:
        if index.fqn not in tensors:
            raise ValueError(f"it has a place for {index.fqn}, but no description")
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


def _of(value: Any, name: str) -> dict[str, Any]:
    """The attributes of a record of a class."""
    if not _is(value, name):
        raise ValueError(f"there is something else than a {name}")
    return _dict(value.has if value.has is not None else {})


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _Record) and value.name == f"{_HOME}{name}"


def _chunks(value: Any) -> list[Any]:
    if _is(value, "metadata.BytesStorageMetadata"):
        return []
    return _list(_of(value, "metadata.TensorStorageMetadata")["chunks"])


def _storage_type(value: Any) -> Any:
    if _is(value, "metadata.BytesStorageMetadata"):
        return BytesStorageMetadata()
    has = _of(value, "metadata.TensorStorageMetadata")
    properties, size = has["properties"], _size(has["size"])
    if not _is(properties, "metadata.TensorProperties"):
        raise ValueError("a tensor has no properties")
    dtype = properties.has[0]
    if not isinstance(dtype, _Name) or dtype.text not in _DTYPES:
        raise ValueError("a tensor has no type")
    chunks = []
    for chunk in _chunks(value):
        of = _of(chunk, "metadata.ChunkStorageMetadata")
        starts, counts = _size(of["offsets"]), _size(of["sizes"])
        if not len(starts) == len(counts) == len(size):
            raise ValueError("a part of a tensor has another number of dimensions")
        if 0 not in counts and any(n + more > whole for n, more, whole in zip(starts, counts, size, strict=True)):
            raise ValueError("a part of a tensor is not inside of it")
        chunks.append(ChunkStorageMetadata(starts, counts))
    return TensorStorageMetadata(TensorProperties(dtype=_DTYPES[dtype.text]), size, chunks)


def _index(value: Any) -> MetadataIndex:
    has = _of(value, "metadata.MetadataIndex")
    offset = has.get("offset")
    return MetadataIndex(_text(has["fqn"]), None if offset is None else _size(offset))


def _info(value: Any) -> _StorageInfo:
    has = _of(value, "filesystem._StorageInfo")
    path = _text(has["relative_path"])
    if len(path) > _PATH:
        raise ValueError(f"it has a path of {len(path)} characters")
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"it points out of its folder, to {path}")
    if has.get("transform_descriptors"):
        raise ValueError("its tensors are stored in a transformed way, which is not supported")
    return _StorageInfo(path, _number(has["offset"]), _number(has["length"]))


def _size(value: Any) -> torch.Size:
    if not isinstance(value, torch.Size):
        raise ValueError("there is something else than a size")
    return value
