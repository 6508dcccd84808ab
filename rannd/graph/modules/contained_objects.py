"""What the attributes of modules hold, and objects in attributes: found without running code of the user's."""

from __future__ import annotations

import contextlib
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn

from rannd.graph.modules.snapshot import DEEPEST, INTERNAL, LONGEST, Sort, read_attributes

GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
"""Sources of random numbers."""
LARGEST = 1 << 24
"""Elements of the largest tensor, or array, in an attribute whose values are kept; what is larger is data."""


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As named_modules, which takes twice as long."""
    waiting = [("", model)]
    seen = set()
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        children = module.__dict__["_modules"]
        if children:
            prefix = f"{name}." if name else ""
            waiting += [(prefix + key, child) for key, child in reversed(children.items()) if child is not None]


def has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Whether something is a tensor of the plain kind, with values."""
    return type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta  # type: ignore[attr-defined]


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one shape have the same values; NaN is NaN."""
    return one.is_meta or torch.equal(one.nan_to_num(), other.nan_to_num())


def write_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Give a tensor its values back. One that has them is not written: autograd would take it for another."""
    with torch.no_grad():
        if tensor.layout is not torch.strided or not same_values(tensor, before):
            tensor.detach().copy_(before)


@contextlib.contextmanager
def same_arrays(model: nn.Module) -> Iterator[None]:
    """Undo what is written into tensors and arrays that are no buffers."""
    contents = Contents(modules_of(model), arrays=True)
    try:
        yield
    finally:
        contents.put_values_back()


class Contents:
    """What the attributes of modules hold, to be put back."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], *, arrays: bool = False) -> None:
        """`arrays`: also the values of tensors and arrays, of up to LARGEST elements each."""
        self.generators: list[tuple[str, Any]] = []
        """Sources of random numbers, with where they are in words. They are not put back."""
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._slots: list[tuple[types.MemberDescriptorType, Any, Any]] = []
        sorts: dict[type, Sort] = {}
        modules = list(modules)
        seen = {id(module) for _, module in modules}
        waiting = [
            (value, 0, f"attribute {key} of module {name}" if name else f"its attribute {key}")
            for name, module in modules
            for key, value in module.__dict__.items()
            if key not in INTERNAL
        ]
        while waiting:
            value, depth, where = waiting.pop()
            kind = type(value)
            if issubclass(kind, (*GENERATORS, torch.Tensor, np.ndarray)):
                if id(value) not in seen:
                    seen.add(id(value))
                    if issubclass(kind, GENERATORS):
                        self.generators.append((where if not depth else f"a generator in {where}", value))
                    elif arrays and has_memory(value) and value.numel() <= LARGEST:
                        self._tensors.append((value, value.detach().clone()))
                    elif arrays and kind is np.ndarray and value.flags.writeable and value.size <= LARGEST:
                        self._arrays.append((value, value.copy()))
                continue
            sort = sorts.setdefault(kind, Sort(kind)) if kind not in sorts else sorts[kind]
            if id(value) in seen or depth >= DEEPEST:
                continue
            if sort.items is not None:
                seen.add(id(value))
                if sort.kind not in (tuple, frozenset):
                    copy = dict(dict.items(value)) if sort.kind is dict else list(sort.items(value))
                    self._containers[id(value)] = (value, copy)
                waiting += [(item, depth + 1, where) for item in islice(sort.items(value), LONGEST[depth])]
            elif depth == 0 and sort.has_attributes:
                seen.add(id(value))
                if sort.dict is not None:
                    own = sort.dict.__get__(value)
                    self._containers[id(own)] = (own, dict(own))
                self._slots += [(slot, value, slot.__get__(value)) for slot in _filled(value, sort)]
                waiting += [(item, 1, where) for _, item in islice(read_attributes(value, sort), LONGEST[0])]

    def put_back(self) -> None:
        """Undo all changes that were made since."""
        for held, content in self._containers.values():
            kind = type(held)
            if issubclass(kind, dict):
                now = dict(dict.items(held))
                if _same(list(now), list(content)) and _same(list(now.values()), list(content.values())):
                    continue
                dict.clear(held)
                dict.update(held, content)
            elif issubclass(kind, list):
                if not _same(list(list.__iter__(held)), content):
                    list.__setitem__(held, slice(None), content)
            elif issubclass(kind, deque):
                if not _same(list(deque.__iter__(held)), content):
                    deque.clear(held)
                    deque.extend(held, content)
            elif {id(item) for item in set.__iter__(held)} != {id(item) for item in content}:
                set.clear(held)
                set.update(held, content)
        for slot, value, content in self._slots:
            slot.__set__(value, content)
        self.put_values_back()

    def put_values_back(self) -> None:
        """Undo what was written into tensors and arrays."""
        for tensor, before in self._tensors:
            write_back(tensor, before)
        for array, copy in self._arrays:
            array[...] = copy


def _filled(value: Any, sort: Sort) -> Iterator[types.MemberDescriptorType]:
    for _, slot in sort.slots:
        with contextlib.suppress(AttributeError):
            slot.__get__(value)
            yield slot


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects; without comparing them, tensors do not compare."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
