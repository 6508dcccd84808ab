"""Snapshots of modules and of the process that can be compared without running user code.

Follows the rules of rannd.graph.fingerprint.state_rules: numbers and strings are recorded by value, containers and
objects of Python itself (functions, partials) by their contents, objects by identity and contents, all others by
identity.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Set
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from rannd.graph.fingerprint.object_reader import C_FUNCTIONS, Form, Sort, form_of, is_bound, modules_of
from rannd.graph.fingerprint.state_rules import (
    GUARD_BYTES,
    GUARD_ITEMS,
    GUARD_LEVELS,
    GUARD_PLAIN_ITEMS,
    GUARD_VALUES,
    GUARD_VALUES_OF_ONE,
    HOOK_FLAGS,
    IGNORED,
    IGNORED_OF_TENSORS,
    MODULE_PARTS,
    TENSORS,
    ModulePart,
    class_of,
    global_hooks,
    modes_around,
    switches,
)
from rannd.graph.python_state.recorded_values import CONTENTS, DOUBLE, ITEMS, MODULE, OBJECT, PARTS

_AS_THEY_ARE = frozenset(
    (int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, range, type(...))
)
"""Types whose values are recorded unchanged: == is exact between them and all other values in a snapshot."""
_TRUE, _FALSE = object(), object()
_OPENED = (Sort.OBJECT, Sort.PARTS, Sort.FUNCTION, Sort.MODULE)
_PACK = DOUBLE.pack


class SnapshotWriter:
    """Converts values to a form that can be compared with ==."""

    def __init__(self, ignored: Set[str], modules: Iterable[nn.Module]) -> None:
        """`ignored`: names of attributes to leave out; `modules`: those for which `module` is called."""
        self.held: list[object] = []
        """Keeps objects that are recorded by id alive, so that no other object gets their ids."""
        self._ignored = ignored
        self._skipped = _SKIPPED | ignored
        self._registered = set(map(id, modules))
        self._known: dict[int, object] = {}
        """Recorded attributes, by id: modules often share a configuration."""
        self._inside: dict[int, int] = {}
        """Objects met in the current attribute, and their depth, by id."""
        self._left = 0
        """Remaining number of values that may be read in the current attribute,"""
        self._left_of_all = GUARD_VALUES
        """and in all."""

    def process(self) -> dict[str, object]:
        """Record the state of the process: settings of torch, global module hooks, active modes."""
        found = global_hooks()
        hooks = [(name, flags, id(hook)) for name, flags, hook in found]
        modes = [mode for mode in modes_around() if type(mode) is not DeviceContext]  # it is in switches(): "device"
        self.held += [*(hook for _, _, hook in found), *modes]
        return {**switches(), "hooks of all modules": hooks, "modes around the call": list(map(id, modes))}

    def module(self, module: nn.Module) -> dict[str, object]:
        """Record the state of a module."""
        skipped, known = self._skipped, self._known
        found: dict[str, object] = {}
        own = object.__getattribute__(module, "__dict__")
        for key, value in own.items():
            if key in skipped:
                continue
            write = _WRITTEN_APART.get(key)
            if write is not None:
                if value:  # an empty container equals a missing one
                    write(self, key, value, own, found)
                continue
            kind = type(value)
            if kind in _AS_THEY_ARE:
                found[key] = value
            elif kind is bool:
                found[key] = _TRUE if value else _FALSE
            elif kind is float:
                found[key] = _PACK(value)
            elif kind is tuple and _AS_THEY_ARE.issuperset(map(type, value)):
                found[key] = kind, value
            elif id(value) in known:
                found[key] = known[id(value)]
            else:
                found[key] = self.attribute(value)
        found["__class__"] = id(type(module))
        self.held.append(type(module))
        return found

    def attribute(self, value: Any) -> object:
        """Record the value of a module's attribute, or a hook."""
        if id(value) not in self._known:
            granted = min(GUARD_VALUES_OF_ONE, self._left_of_all)
            self._inside, self._left = {}, granted
            self._known[id(value)] = (id(value),)  # for values that contain themselves
            self._known[id(value)] = self._write(value, 0)
            self.held.append(value)
            self._left_of_all -= granted - self._left
        return self._known[id(value)]

    # -- parts of modules ------------------------------------------------------------------------------------------

    def _tensors(self, key: str, tensors: dict[str, Any], own: dict[str, Any], found: dict[str, object]) -> None:
        self.held += tensors.values()
        written: list[object] = []
        for name, tensor in tensors.items():
            kind = type(tensor)
            if kind not in TENSORS and class_of(kind) not in TENSORS:
                written.append((id(tensor), tensor is not None and tensor.requires_grad))
                continue
            written.append((id(tensor), tensor.requires_grad, tensor.dtype, tensor.shape))
            if tensor.__dict__ and (more := self._tensor_attributes(tensor)):
                found[name] = OBJECT, id(tensor), id(class_of(kind)), more
        found[key] = tuple(tensors), written

    def _children(self, key: str, modules: dict[str, Any], own: dict[str, Any], found: dict[str, object]) -> None:
        self.held += modules.values()
        found[key] = tuple(modules), tuple(map(id, modules.values()))

    def _names(self, key: str, names: set[str], own: dict[str, Any], found: dict[str, object]) -> None:
        found[key] = frozenset(names)

    def _hooks(self, key: str, hooks: dict[int, Any], own: dict[str, Any], found: dict[str, object]) -> None:
        flagged = [own.get(flag) or () for flag in HOOK_FLAGS[key]]
        found[key] = [(self.attribute(hook), [place in each for each in flagged]) for place, hook in hooks.items()]

    # -- values ----------------------------------------------------------------------------------------------------

    def _write(self, value: Any, depth: int) -> object:
        """Record a value that is nested `depth` objects deep in a module's attribute."""
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if kind is bool:
            return _TRUE if value else _FALSE
        if kind is float:
            return _PACK(value)
        form = form_of(kind)
        if form.content is not None:
            return id(kind), form.content(value)
        self.held.append(value)
        here = id(value)
        if form.exact and form.items is not None:
            return self._container(value, form, depth)
        if form.sort is Sort.TENSOR:
            more = self._tensor_attributes(value) if value.__dict__ else None
            return (OBJECT, _tensor(value), 0, more) if more else _tensor(value)
        if form.sort is Sort.ARRAY:
            small = value.nbytes <= GUARD_BYTES and not value.dtype.hasobject
            return here, value.dtype.str, value.shape, value.tobytes() if small else None
        opened = depth < form.closed and form.sort in _OPENED and here not in self._registered
        if not opened or self._inside.get(here, GUARD_LEVELS) <= depth or self._left <= 0:
            return (here,)
        self._inside[here] = depth
        if form.parts is not None:
            return self._made_of(value, form, depth)
        self.held.append(kind)
        if form.sort is Sort.MODULE:
            return self._hidden(value)
        return OBJECT, here, id(kind), self._attributes(value, form, depth)

    def _attributes(self, value: Any, form: Form, depth: int) -> dict[str, object]:
        kind = form.kind
        skipped = self._ignored | IGNORED.get((kind.__module__, kind.__qualname__), frozenset())
        found: dict[str, object] = {}
        for key, inner in form.named(value)[: GUARD_ITEMS[0]]:
            if key in skipped:
                continue
            known = type(inner)
            if known in _AS_THEY_ARE:
                found[key] = inner
            elif known is bool:
                found[key] = _TRUE if inner else _FALSE
            else:
                found[key] = self._write(inner, depth + 1)
        self._left -= len(found)
        if form.items is not None:
            found[CONTENTS] = self._container(value, form, depth)
        return found

    def _tensor_attributes(self, tensor: torch.Tensor) -> dict[str, object]:
        own = tensor.__dict__.items()
        named = [(key, value) for key, value in own if not key.startswith(IGNORED_OF_TENSORS)]
        return {key: self._write(value, GUARD_LEVELS) for key, value in named if key not in self._ignored}

    def _made_of(self, value: Any, form: Form, depth: int) -> object:
        """Record a function by identity and closure, other objects of Python itself by their components alone."""
        assert form.parts is not None
        if form.kind in C_FUNCTIONS and not is_bound(value):
            return (id(value),)
        identity = None
        if form.sort is Sort.FUNCTION:
            self.held.append(value.__code__)
            identity = id(value), id(value.__code__)
        parts = [self._write(part, depth + 1) for _, part in form.parts(value)]
        self._left -= len(parts)
        return PARTS, id(form.kind), identity, parts

    def _hidden(self, module: nn.Module) -> object:
        """Record a module that is not registered as a submodule, with all of its submodules."""
        inside = [(path, each) for path, each in modules_of(module) if id(each) not in self._registered]
        self._registered |= {id(each) for _, each in inside}
        left, met = self._left, self._inside
        states = {path: self.module(each) for path, each in inside}
        self._left, self._inside = left - sum(map(len, states.values())), met
        return MODULE, id(module), states

    def _container(self, value: Any, form: Form, depth: int) -> object:
        """Record the contents of a container, and its identity if it has more than the recorded contents."""
        size = form.size(value)
        items = list(islice(form.items(value), GUARD_PLAIN_ITEMS))
        keys = list(islice(form.keys(value), GUARD_PLAIN_ITEMS)) if form.mapping and size else None
        told, named = _plain(items), keys and _plain(keys)
        most = GUARD_PLAIN_ITEMS
        if told is None or (keys and named is None):
            opened = depth < GUARD_LEVELS and self._left > 0 and self._inside.get(id(value), GUARD_LEVELS) > depth
            most = GUARD_ITEMS[depth] if opened else 0
            self._inside[id(value)] = depth if opened else self._inside.get(id(value), GUARD_LEVELS)
            told = [self._write(item, depth + 1) for item in items[:most]]
            named = [self._write(key, depth + 1) for key in keys[:most]] if keys else None
            self._left -= len(told)
        extra = form.extra and self._write(form.extra(value), depth + 1)
        identity = 0 if size <= most and form.exact else id(value)
        return ITEMS, id(form.kind), size, identity, extra, named, told


def is_constant(value: Any) -> bool:
    """Whether a module's attribute has no contents that may change: the same object is recorded alike."""
    kind = type(value)
    if kind is tuple:
        return _AS_THEY_ARE.issuperset(map(type, value))
    return kind in _AS_THEY_ARE or kind is bool or kind is float


def is_skipped(key: str) -> bool:
    """Whether an attribute of modules is not recorded, or with another one."""
    return key in _SKIPPED


def _tensor(tensor: torch.Tensor) -> object:
    """Record a tensor without its attributes."""
    return id(tensor), tensor.requires_grad, tensor.dtype, tensor.shape


def _plain(values: list[Any]) -> object:
    """Record values that are all ints and strings, all floats or all bools as one; None for any others."""
    if _AS_THEY_ARE.issuperset(map(type, values)):
        return values
    if _FLOAT.issuperset(map(type, values)):
        return struct.pack(f"{len(values)}d", *values)
    if _BOOL.issuperset(map(type, values)):
        return bytes(values), _TRUE
    return None


_FLOAT, _BOOL = frozenset((float,)), frozenset((bool,))
_WRITTEN: dict[ModulePart, Callable[[SnapshotWriter, str, Any, dict[str, Any], dict[str, object]], None]] = {
    ModulePart.TENSORS: SnapshotWriter._tensors,
    ModulePart.MODULES: SnapshotWriter._children,
    ModulePart.NAMES: SnapshotWriter._names,
    ModulePart.HOOKS: SnapshotWriter._hooks,
}
_WRITTEN_APART = {name: _WRITTEN[part] for name, part in MODULE_PARTS.items() if part in _WRITTEN}
_SKIPPED = frozenset(name for name, part in MODULE_PARTS.items() if part in (ModulePart.FLAGS, ModulePart.SAVING))
