"""Values that ``torch.save`` wrote, read without unpickling: plain data and dense tensors (see pickle_reader.py)."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from torch import nn

from rannd.runtime.storage.pickle_reader import Name, PickleReader, Record, number, text
from rannd.runtime.storage.torch_archive import Archive, Bytes

DEEPEST = 100
"""Containers in each other."""
MOST_ALIKE = 100
"""Keys of a dict with one hash; -1 and -2 have one."""
SHARING = 64
"""Values for each byte of a pickle, which says once what is in several places."""
_LEAST = 1 << 20
"""Values that also a small pickle may describe."""

_DTYPES = {
    str(each): each
    for name, each in vars(torch).items()
    if isinstance(each, torch.dtype) and not name.startswith(("q", "bits"))
}
_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.storage.UntypedStorage": torch.uint8,
}


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    bytes: Bytes


@dataclass(frozen=True)
class StoredTensor:
    """A dense tensor in a file, all of whose elements are inside of its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: Bytes
    requires_grad: bool
    conjugate: bool
    negative: bool

    def read(self, file: BinaryIO) -> torch.Tensor:
        """The tensor, on the CPU. OSError where its bytes are not there."""
        return self.of(self.storage.read(file))

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """The tensor in the bytes of its storage."""
        made = data.view(self.dtype).as_strided(self.size, self.stride, self.offset)
        made = made.conj() if self.conjugate else made
        made = made.neg() if self.negative else made
        return made.requires_grad_(self.requires_grad)


def read_value(file: BinaryIO, begin: int, count: int) -> Any:
    """A value that torch.save wrote.

    Args:
        file: An open file.
        begin, count: Where the value lies in it, in bytes.

    Raises:
        ValueError: It is damaged, too deep, or holds anything but None, numbers, strings, bytes, lists, tuples, sets,
            dicts and dense tensors.
        OSError: It cannot be read.
    """
    held: dict[Bytes, torch.Tensor] = {}

    def tensor(stored: StoredTensor) -> torch.Tensor:
        if stored.storage not in held:
            held[stored.storage] = stored.storage.read(file)
        return stored.of(held[stored.storage])

    return _value(Archive(file, begin, count), tensor)


def find_tensor(file: BinaryIO, begin: int, count: int) -> StoredTensor:
    """Where the tensor is that torch.save wrote; arguments and errors as of `read_value`."""
    found = _value(Archive(file, begin, count), lambda stored: stored)
    if not isinstance(found, StoredTensor):
        raise ValueError("it is no tensor")
    return found


def _value(archive: Archive, tensor: Callable[[StoredTensor], Any]) -> Any:
    data = archive.pickle()
    try:
        return _Maker(max(_LEAST, SHARING * len(data)), tensor).make(_ValueReader(archive).read(data), 0)
    except (TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as exc:
        raise ValueError(f"it is damaged, or no plain data: {type(exc).__name__}: {exc}") from exc


@dataclass(eq=False)
class _Dict(Record):
    """A dict as the file describes it: no key is hashed before it is known what the keys are."""

    items: list[Any] = field(default_factory=list)


class _ValueReader(PickleReader):
    def __init__(self, archive: Archive) -> None:
        super().__init__("a value", _NAMES)
        self._archive = archive

    def new_dict(self) -> Any:
        return _Dict("dict", ())

    def put_items(self, target: Any, items: list[Any]) -> None:
        if not isinstance(target, _Dict) or len(items) % 2:
            raise ValueError("it puts items into what is no dict")
        target.items.extend(items)

    def make(self, name: str, made_of: tuple[Any, ...]) -> Any:
        if name == _ORDERED and not made_of:
            return _Dict(name, ())
        return super().make(name, made_of)

    def persistent(self, said: Any) -> Any:
        kind, storage, key, _, count = said
        if kind != "storage" or not isinstance(storage, Name) or storage.text not in _STORAGES:
            raise ValueError("it refers to what is no storage")
        dtype, place = _STORAGES[storage.text], self._archive.storage(text(key))
        if number(count) * dtype.itemsize != place.count:
            raise ValueError(f"a storage has {place.count} bytes, not {count} elements")
        return _Storage(dtype, place)


class _Maker:
    """Makes plain data of what a pickle describes: up to `most` values, also where one is in many places."""

    def __init__(self, most: int, tensor: Callable[[StoredTensor], Any]) -> None:
        self._left = most
        self._tensor = tensor
        self._tensors: dict[int, Any] = {}
        """Those made, by the id of their record: a tensor that is in several places stays one."""

    def make(self, said: Any, depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("it describes far more values than it has bytes")
        if depth > DEEPEST:
            raise ValueError(f"it has more than {DEEPEST} containers in each other")
        match said:
            case _Dict():
                return self._dict(said, depth)
            case Record():
                if id(said) not in self._tensors:
                    made = self._made(said, depth)
                    if not isinstance(made, torch.Tensor):
                        return made
                    self._tensors[id(said)] = made
                return self._tensors[id(said)]
            case list():
                return [self.make(each, depth + 1) for each in said]
            case tuple():
                return tuple([self.make(each, depth + 1) for each in said])
            case Name():
                return _DTYPES[said.text]
        return said

    def _dict(self, said: _Dict, depth: int) -> dict[Any, Any]:
        keys = _checked_keys([self.make(each, depth + 1) for each in said.items[::2]])
        values = [self.make(each, depth + 1) for each in said.items[1::2]]
        pairs = zip(keys, values, strict=True)
        made: dict[Any, Any] = OrderedDict(pairs) if said.name == _ORDERED else dict(pairs)
        if said.has is not None:  # what the state_dict of a module has
            about = self.make(said.has, depth + 1)
            if said.name != _ORDERED or about.keys() != {"_metadata"}:
                raise ValueError("a dict has attributes")
            vars(made).update(about)
        return made

    def _made(self, said: Record, depth: int) -> Any:
        if said.has is not None:
            raise ValueError(f"it gives attributes to a {said.name}")
        made = _CALLS[said.name](*[self.make(each, depth + 1) for each in said.made_of])
        return self._tensor(made) if isinstance(made, StoredTensor) else made


def _checked_keys(keys: list[Any]) -> list[Any]:
    """Keys of a dict or elements of a set that are quickly told from each other."""
    for key in keys:
        if not _is_key(key):
            raise ValueError(f"a {type(key).__name__} is no key of plain data")
    most = max(Counter(map(hash, keys)).values(), default=0)
    if most > MOST_ALIKE:
        raise ValueError(f"{most} keys of a dict have one hash")
    return keys


def _is_key(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_key, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


def _bytes(said: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes have the encoding {text(encoding)[:80]}")
    return said.encode("latin1")


def _counter(items: Mapping[Any, Any]) -> Counter[Any]:
    if type(items) is not dict or not all(type(each) is int for each in items.values()):
        raise ValueError("a Counter is made of what is no dict of numbers")
    return Counter(items)


def _size(items: Iterable[Any]) -> torch.Size:
    return torch.Size([number(each) for each in items])


def _parameter(data: torch.Tensor, requires_grad: bool, _: Any) -> nn.Parameter:
    return nn.Parameter(data, requires_grad is True)


def _tensor(
    storage: _Storage,
    offset: int,
    size: Any,
    stride: Any,
    requires_grad: bool,
    hooks: Any,
    metadata: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> StoredTensor:
    """As ``torch._utils._rebuild_tensor_v2``; with `dtype`, of another type than the storage."""
    if not isinstance(storage, _Storage) or hooks:
        raise ValueError("a tensor is made of what is no storage, or has hooks")
    dtype = storage.dtype if dtype is None else dtype
    size, stride = (tuple(number(each) for each in numbers) for numbers in (size, stride))
    last = number(offset) + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count, there = math.prod(size), storage.bytes.count // dtype.itemsize
    if storage.bytes.count % dtype.itemsize or (count and last >= there) or count > there or offset > there:
        raise ValueError("a tensor is not inside of its storage")
    about = metadata or {}
    if not about.keys() <= {"conj", "neg"}:
        raise ValueError("a tensor has other properties than conj and neg")
    return StoredTensor(
        dtype,
        size,
        stride,
        offset,
        storage.bytes,
        requires_grad is True and (dtype.is_floating_point or dtype.is_complex),
        about.get("conj") is True,
        about.get("neg") is True,
    )


def _tensor_of(*parts: Any) -> StoredTensor:
    """As ``_rebuild_tensor_v3``, which has the dtype before the metadata."""
    storage, offset, size, stride, requires_grad, hooks, dtype, *metadata = parts
    return _tensor(storage, offset, size, stride, requires_grad, hooks, metadata[0] if metadata else None, dtype)


_ORDERED = "collections.OrderedDict"
_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": _size,
    "torch.device": lambda *parts: torch.device(*parts),
    "collections.Counter": _counter,
    "_codecs.encode": _bytes,
    "builtins.bytes": lambda: b"",
    "builtins.bytearray": lambda data=b"": bytearray(memoryview(data)),
    "builtins.set": lambda items: set(_checked_keys(items)),
    "builtins.complex": lambda real, imaginary: complex(float(real), float(imaginary)),
}
_NAMES = frozenset({_ORDERED, *_CALLS, *_DTYPES, *_STORAGES})
