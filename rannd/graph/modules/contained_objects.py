"""Record the contents of modules' attributes, and restore them after user code has run."""

from __future__ import annotations

import contextlib
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

import torch
from torch import nn

from rannd.graph.fingerprint.object_reader import PARTS, Form, Held, Sort, attributes_of, form_of, walk
from rannd.graph.fingerprint.object_reader import modules_of as modules_of
from rannd.graph.fingerprint.state_rules import GUARD_BYTES, IGNORED_OF_TENSORS, MODULE_PARTS, TENSORS, UNDO_ELEMENTS


def has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a dense tensor or parameter with storage, no subclass and not on the meta device.

    Parameters that replicas divide (ZeRO 3) have none while no segment reads them.
    """
    if not isinstance(value, torch.Tensor) or type(value) not in (torch.Tensor, nn.Parameter):
        return False
    dense = value.layout is torch.strided and not value.is_meta
    return dense and (value.numel() == 0 or value.untyped_storage().nbytes() > 0)


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of equal shape have the same values; NaN equals NaN."""
    return one.is_meta or torch.equal(one.nan_to_num(), other.nan_to_num())


def write_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Restore the values of a tensor. An unchanged one is not written, since a write would increment its version."""
    with torch.no_grad():
        if tensor.layout is not torch.strided or not same_values(tensor, before):
            tensor.detach().copy_(before)


@contextlib.contextmanager
def same_arrays(model: nn.Module) -> Iterator[None]:
    """Undo writes into tensors and arrays in attributes other than parameters and buffers."""
    contents = Contents(modules_of(model), arrays=True)
    try:
        yield
    finally:
        contents.put_values_back()


_EMPTY = object()
"""The content of a slot that is not set."""


class Contents:
    """Recorded contents of modules' attributes, within the limits of the guard of a call, and their restoration."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], *, arrays: bool = False) -> None:
        """`arrays`: record the values of tensors and arrays, too, of up to UNDO_ELEMENTS elements each."""
        self.generators: list[tuple[str, Any]] = []
        """(location in words, random number generator). Generators are not restored."""
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._slots: list[tuple[Any, Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._marks: list[tuple[torch.Tensor, dict[str, Any]]] = []
        """Attributes of tensors."""
        modules = list(modules)
        for _, module in modules:
            own = attributes_of(module)
            for tensor in (*own["_parameters"].values(), *own["_buffers"].values()):
                self._mark(tensor)
        for held in walk(modules):
            value, form = held.value, held.form
            if form.sort is Sort.GENERATOR:
                where = _in_words(held)
                self.generators.append((where if not held.depth else f"a generator in {where}", value))
            elif issubclass(form.kind, torch.Tensor):
                self._mark(value)
                if arrays and has_memory(value) and value.numel() <= UNDO_ELEMENTS:
                    self._tensors.append((value, value.detach().clone()))
            elif form.sort is Sort.ARRAY:
                kept = value.size <= UNDO_ELEMENTS if arrays else value.nbytes <= GUARD_BYTES
                if kept and value.flags.writeable:
                    self._arrays.append((value, value.copy()))
            elif form.sort is Sort.MODULE and held.opened:
                self._module(value)
            elif form.sort is Sort.FUNCTION:
                cells = value.__closure__ or () if held.opened else ()
                self._cells += [(cell, inner) for cell in cells for _, inner in PARTS[types.CellType](cell)]
            elif type(value) is bytearray:
                self._containers[id(value)] = (value, bytes(value))
            elif form.sort is Sort.OBJECT:
                self._object(value, form, held.opened)

    def _object(self, value: Any, form: Form, opened: bool) -> None:
        if form.items is not None and not issubclass(form.kind, (tuple, frozenset)):
            self._containers[id(value)] = (value, form.copy(value))
        if not opened:
            return
        if form.attributes is not None:
            self._dict(form.attributes.__get__(value))
        filled = dict(form.named(value))
        self._slots += [(slot, value, filled.get(name, _EMPTY)) for name, slot in form.slots]

    def _module(self, module: nn.Module) -> None:
        """Record a module that is only in an attribute; those of the module tree are restored by the callers."""
        own = attributes_of(module)
        self._dict(own)
        for name in MODULE_PARTS.keys() & own.keys():
            if isinstance(own[name], dict):
                self._dict(own[name])

    def _dict(self, held: dict[str, Any]) -> None:
        self._containers[id(held)] = (held, dict(held))

    def _mark(self, tensor: torch.Tensor | None) -> None:
        if type(tensor) in TENSORS:
            self._marks.append((tensor, dict(tensor.__dict__)))  # type: ignore[arg-type]

    def put_back(self) -> None:
        """Restore all recorded contents."""
        for held, content in self._containers.values():
            kind = type(held)
            now = form_of(kind).copy(held) if kind is not bytearray else held
            if kind is bytearray:
                held[:] = content
            elif issubclass(kind, dict):
                if _same(list(now), list(content)) and _same(list(now.values()), list(content.values())):
                    continue
                base = OrderedDict if issubclass(kind, OrderedDict) else dict
                base.clear(held)
                for key, value in content.items():
                    base.__setitem__(held, key, value)
            elif issubclass(kind, list):
                if not _same(now, content):
                    list.__setitem__(held, slice(None), content)
            elif issubclass(kind, deque):
                if not _same(now, content):
                    deque.clear(held)
                    deque.extend(held, content)
            elif not _same(now, content):
                set.clear(held)
                set.update(held, content)
        for tensor, marks in self._marks:
            if tensor.__dict__ or marks:
                left = {name: mark for name, mark in tensor.__dict__.items() if name.startswith(IGNORED_OF_TENSORS)}
                tensor.__dict__.clear()
                tensor.__dict__.update(marks | left)
        for cell, content in self._cells:
            if not _same([inner for _, inner in PARTS[types.CellType](cell)], [content]):
                cell.cell_contents = content
        for slot, value, content in self._slots:
            if content is not _EMPTY:
                slot.__set__(value, content)
            else:
                with contextlib.suppress(AttributeError):  # the slot is still empty
                    slot.__delete__(value)
        self.put_values_back()

    def put_values_back(self) -> None:
        """Restore the values of tensors and arrays."""
        for tensor, before in self._tensors:
            write_back(tensor, before)
        for array, copy in self._arrays:
            array[...] = copy


def _in_words(held: Held) -> str:
    """Name the attribute and module that lead to an object."""
    return f"attribute {held.name} of module {held.module}" if held.module else f"its attribute {held.name}"


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists hold the same objects, by identity: == is not defined for tensors as a truth value."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
