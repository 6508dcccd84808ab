"""Find user code inside libraries: functions and classes that were registered with or assigned into them.

``torch.nn.functional.gelu = mine``, ``GPT2Block.forward = mine`` and attention functions that are registered by name
with Hugging Face change what library classes do, and nothing in the model refers to them.
"""

from __future__ import annotations

import collections
import functools
import operator
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rannd.graph.fingerprint import allowlists
from rannd.graph.fingerprint.introspect import HEAP_TYPE, cells, mro_of, namespace, vars_of
from rannd.graph.fingerprint.object_reader import attributes_of
from rannd.graph.fingerprint.provenance import (
    PYTHON,
    USER,
    owner_of_class,
    owner_of_file,
    owner_of_function,
    owner_of_module,
)
from rannd.graph.fingerprint.state_rules import KEY_ITEMS, LIBRARY_LEVELS

_UNINTERESTING = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, types.ModuleType,
     types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.MethodWrapperType,
     types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType}
)  # fmt: skip
_FUNCTIONS = frozenset(
    {types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType}
)


@dataclass(frozen=True)
class _Noted:
    """Cached list of the functions in a namespace, valid as long as it holds the same values."""

    keys: tuple[str, ...]
    values: tuple[Any, ...]
    text: str
    owners: frozenset[str]
    partial: list[tuple[str, Any]]
    """functools.partial objects, whose arguments count as well."""


_noted: dict[str, _Noted] = {}


class Foreign:
    """Search result: user `values` by location, texts that list the `functions`, and their `owners`."""

    def __init__(self, libraries: Iterable[str]) -> None:
        """Search torch's namespaces, the modules `libraries`, and the modules that these import from their package."""
        self.values: list[tuple[str, Any]] = []
        self.functions: list[str] = []
        self.owners: set[str] = set()
        self._seen: set[int] = set()
        self._class_owners: dict[type, str] = {}
        self._noted = {*allowlists.LOOKED_INTO, *libraries}
        waiting = [*allowlists.LOOKED_INTO, *sorted(set(libraries) - set(allowlists.LOOKED_INTO))]
        known = set(waiting)
        for name in waiting:
            module = sys.modules.get(name)
            if module is None:
                continue
            owner = owner_of_module(module)
            if owner == USER or (owner == PYTHON and name not in allowlists.LOOKED_INTO):
                continue
            inside = namespace(module)
            top = name.split(".")[0]
            if name in self._noted:
                self._functions(name, inside)
            if top == "torch":
                self._inside(inside, name, 1, classes=False)
            else:
                waiting += self._neighbours(top, inside, known)
                self._inside(inside, name, LIBRARY_LEVELS)
        self._functions("torch.Tensor", vars_of(torch.Tensor))
        self._class(torch.Tensor, "torch.Tensor", 2)

    def _functions(self, name: str, inside: Mapping[str, Any]) -> None:
        """Record which function each name refers to: another library may have replaced it by its own."""
        keys, values = tuple(inside), tuple(inside.values())
        known = _noted.get(name)
        if known is None or known.keys != keys or not all(map(operator.is_, known.values, values)):
            lines, owners = [], set()
            partial = [(key, value) for key, value in inside.items() if type(value) is functools.partial]
            for key, value in zip(keys, values, strict=True):
                if type(value) in _FUNCTIONS:
                    lines.append(f"{name}.{key} {getattr(value, '__module__', '')} {value.__qualname__}")
                    if type(value) is types.FunctionType:
                        owners.add(owner_of_file(value.__code__.co_filename))
            known = _noted[name] = _Noted(keys, values, "\n".join(lines), frozenset(owners), partial)
        self.functions.append(known.text)
        self.values += [(f"{name}.{key}", value) for key, value in known.partial]
        self.owners |= known.owners

    @staticmethod
    def _neighbours(top: str, inside: dict[str, Any], known: set[str]) -> list[str]:
        """Names of modules of the same package whose functions or classes this namespace contains."""
        found = []
        for value in inside.values():
            kind = type(value)
            if kind is types.FunctionType or kind is type or (kind not in _UNINTERESTING and type in mro_of(kind)):
                home = value.__module__
                if type(home) is str and home not in known and home.startswith(top):
                    known.add(home)
                    found.append(home)
        return found

    def _inside(self, values: dict[Any, Any], place: str, depth: int, classes: bool = True) -> None:
        """Search the values of a namespace; `classes`: search library classes, too."""
        seen = self._seen
        for key, value in tuple(values.items()):
            kind = type(value)
            if kind in _UNINTERESTING or id(value) in seen:
                continue
            if kind is types.FunctionType and value.__closure__ is None and owner_of_file(value.__code__.co_filename):
                continue
            if not classes and type in mro_of(kind) and self._owner(value):
                continue
            self._value(value, f"{place}.{key}" if type(key) is str else place, depth)

    def _value(self, value: Any, place: str, depth: int) -> None:
        kind = type(value)
        if kind in _UNINTERESTING or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if kind is types.FunctionType:
            if not owner_of_function(value):
                self.values.append((place, value))
            elif depth:
                self._inside(dict(cells(value)), place, depth - 1)
        elif kind is staticmethod or kind is classmethod:
            self._value(value.__func__, place, depth)
        elif kind is property:
            for accessor in (value.fget, value.fset):
                self._value(accessor, place, depth)
        elif kind is functools.partial:
            self._value(value.func, place, depth)
            self._inside(dict(enumerate(value.args)) | value.keywords, place, depth)
        elif kind is types.MethodType:
            self._value(value.__func__, place, depth)
            self._value(value.__self__, place, depth)
        elif type in mro_of(kind):
            self._class(value, place, depth)
        elif not depth:
            return
        elif kind is dict or kind is collections.OrderedDict:
            if len(value) <= KEY_ITEMS:
                self._inside(value, place, depth - 1)
        elif kind is list or kind is tuple:
            if len(value) <= KEY_ITEMS:
                self._inside(dict(enumerate(value)), place, depth - 1)
        elif kind.__flags__ & HEAP_TYPE and kind.__dictoffset__ and types.ModuleType not in mro_of(kind):
            if not self._owner(kind):
                self.values.append((place, value))
                return
            self._inside(attributes_of(value), place, depth - 1)
            self._value(kind, f"the class of {place}", depth - 1)

    def _class(self, cls: type, place: str, depth: int) -> None:
        if not cls.__flags__ & HEAP_TYPE:
            return
        if not self._owner(cls):
            self.values.append((place, cls))
            return
        for base in mro_of(cls):
            if base is cls or (id(base) not in self._seen and base.__flags__ & HEAP_TYPE):
                self._seen.add(id(base))
                self._inside(dict(vars_of(base)), place, max(depth - 1, 1))

    def _owner(self, cls: type) -> str:
        known = self._class_owners.get(cls)
        if known is None:
            known = self._class_owners[cls] = owner_of_class(cls)
        return known
