"""Attributes of modules and objects in a form that compares without running code of the user's.

Plain values are written by value, containers of them by what they hold, everything else by identity; of an object that
is an attribute, what its attributes hold as well.
"""

from __future__ import annotations

import contextlib
import struct
import types
from collections import deque
from collections.abc import Iterator, Set
from itertools import islice
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn

HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
"""Where a module keeps its hooks."""
INTERNAL = frozenset(nn.Module().__dict__)
"""The attributes of every module. Those that are no hooks, tensors or flags concern saving and loading only."""
_LISTED = frozenset({"_parameters", "_buffers", "_modules", *HOOKS})
_AS_THEY_ARE = frozenset(
    (int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, range, type(...))
)
"""Types whose values compare as they should, with each other and with everything else that is in a state."""
LONGEST = (256, 64, 64)
"""So many items are looked at, of containers in attributes, in those, and in those."""
DEEPEST = len(LONGEST)
ABSENT, _TRUE, _FALSE, _OBJECT = object(), object(), object(), object()
_PACK = struct.Struct("d").pack
_OPAQUE = (torch.Tensor, np.ndarray, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
"""What is told by its identity alone."""


Object = tuple[object, int, int, dict[str, object]]
"""An object as it is written: _OBJECT, its id, that of its class, its attributes."""


def is_object(value: object) -> TypeGuard[Object]:
    """Whether a written value is an object with its attributes."""
    return type(value) is tuple and len(value) == 4 and value[0] is _OBJECT


class SnapshotWriter:
    """Writes values in a form that compares."""

    def __init__(self, ignored: Set[str], modules: Set[int]) -> None:
        self.held: list[object] = []
        self._ignored = ignored
        self._registered = modules
        self._skipped = (INTERNAL - _LISTED - {"training", "_is_full_backward_hook"}) | ignored
        self._known: dict[int, object] = {}
        """Values of attributes, by id: modules share their configuration."""
        self._sorts: dict[type, Sort] = {}

    def module(self, module: nn.Module) -> dict[str, object]:
        """The state of one module."""
        skipped, known, found = self._skipped, self._known, {}
        for key, value in module.__dict__.items():
            if key in skipped:
                continue
            kind = type(value)
            if kind in _AS_THEY_ARE:
                found[key] = value
            elif kind is bool:
                found[key] = _TRUE if value else _FALSE
            elif kind is float:
                found[key] = _PACK(value)
            elif key in _LISTED:
                if value:  # nothing is the same as no container
                    found[key] = self._listed(key, list(value.values()))
            elif id(value) in known:
                found[key] = known[id(value)]
            else:
                found[key] = known[id(value)] = self._write(value, 0)
        return found

    def _listed(self, key: str, values: list[Any]) -> object:
        self.held += values
        if key == "_parameters":
            return tuple([(id(each), each is not None and each.requires_grad) for each in values])
        return tuple(map(id, values))

    def _write(self, value: Any, depth: int) -> object:
        """A value that is `depth` containers below a module's attribute."""
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if kind is bool:
            return _TRUE if value else _FALSE
        if kind is float:
            return _PACK(value)
        sort = self._sorts.get(kind)
        if sort is None:
            sort = self._sorts[kind] = Sort(kind)
        if sort.scalar is not None:
            return kind, sort.scalar(value)
        if sort.items is not None and depth < DEEPEST:
            return self._container(value, sort, depth)
        self.held.append(value)
        if kind is types.MethodType:
            return kind, id(value.__func__), id(value.__self__)
        if not sort.has_attributes or depth or id(value) in self._registered:
            return (id(value),)
        self._known[id(value)] = (id(value),)  # it may hold itself
        self.held.append(kind)
        attributes = {
            key: self._write(inner, 1)
            for key, inner in islice(read_attributes(value, sort), LONGEST[0])
            if key not in self._ignored
        }
        return _OBJECT, id(value), id(kind), attributes

    def _container(self, value: Any, sort: Sort, depth: int) -> object:
        kind, size = type(value), sort.size(value)
        whole = size <= LONGEST[depth]
        known: tuple[object, ...] = (kind, size)
        if not whole or not sort.exact:
            self.held.append(value)
            known = (kind, size, id(value))
        items = [self._write(item, depth + 1) for item in islice(sort.items(value), LONGEST[depth])]
        if sort.kind is dict:
            keys = [self._write(key, depth + 1) for key in islice(dict.keys(value), LONGEST[depth])]
            return (*known, keys, items)
        if sort.kind in (set, frozenset):
            return (*known, _Unordered(items) if whole else None)
        return (*known, items)


class _Unordered:
    """The written items of a set, in any order."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Unordered) or len(self._items) != len(other._items):
            return False
        return all(item in other._items for item in self._items)

    __hash__ = None  # type: ignore[assignment]


class Sort:
    """How the values of one type are written."""

    def __init__(self, kind: type) -> None:
        self.scalar: Any = None
        """The content of a number or text, as bytes."""
        self.items: Any = None
        """The items of a container; the values of a dict."""
        self.size: Any = None
        self.kind: type = kind
        """The built-in type of a container."""
        self.exact = kind.__module__ in ("builtins", "collections", "torch")
        """Whether a container is told by what it holds."""
        self.slots: list[tuple[str, types.MemberDescriptorType]] = []
        self.dict: Any = None
        """The descriptor of an object's `__dict__`."""
        if issubclass(kind, np.generic):
            self.scalar = np.generic.tobytes
        elif kind is bytes:
            self.scalar = bytes
        elif kind is complex:
            self.scalar = _complex
        elif issubclass(kind, (list, tuple, deque, set, frozenset, dict)):
            base = next(each for each in (list, tuple, deque, set, frozenset, dict) if issubclass(kind, each))
            self.kind, self.size = base, base.__len__
            self.items = dict.values if base is dict else base.__iter__
        elif not issubclass(kind, _OPAQUE):
            self._find_attributes(kind)

    @property
    def has_attributes(self) -> bool:
        return bool(self.dict or self.slots)

    def _find_attributes(self, kind: type) -> None:
        for base in kind.__mro__:
            if self.dict is None and "__dict__" in base.__dict__:
                self.dict = base.__dict__["__dict__"]
            if "__slots__" in base.__dict__:
                self.slots += [
                    (name, each) for name, each in base.__dict__.items() if type(each) is types.MemberDescriptorType
                ]
        if type(self.dict) is not types.GetSetDescriptorType:  # a property of the user's
            self.dict = None


def _complex(value: complex) -> bytes:
    return _PACK(value.real) + _PACK(value.imag)


def attributes_of(value: object) -> list[tuple[str, Any]]:
    """The attributes of an object, by name, read without its code; none of what has no code of Python's."""
    return list(read_attributes(value, Sort(type(value))))


def read_attributes(value: Any, sort: Sort) -> Iterator[tuple[str, Any]]:
    """An object's attributes, read without its code."""
    if sort.dict is not None:
        yield from dict.items(sort.dict.__get__(value))
    for name, slot in sort.slots:
        with contextlib.suppress(AttributeError):  # it has none
            yield name, slot.__get__(value)
