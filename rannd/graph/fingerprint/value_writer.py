"""Serialize Python values to text: equal texts for values that make no difference to a trace.

Runs no user code: no property, ``__getattr__``, ``__eq__`` or ``__repr__``. Containers, objects with attributes and
slots, and arrays are written with their contents; an object with state that cannot be read raises Hidden. A mutable
object that occurs again, also inside itself, is written as a reference to its first occurrence.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import operator
import re
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from rannd.graph.fingerprint import allowlists
from rannd.graph.fingerprint.bytecode import number
from rannd.graph.fingerprint.introspect import full_name, module_name, mro_of
from rannd.graph.fingerprint.object_reader import (
    C_DESCRIPTORS,
    C_FUNCTIONS,
    CACHED,
    NUMBERS,
    PARTS,
    Form,
    Sort,
    form_of,
)
from rannd.graph.fingerprint.provenance import USER, owner_of_class, owner_of_function, owner_of_name
from rannd.graph.fingerprint.state_rules import IGNORED, KEY_BYTES, KEY_ITEMS, KEY_VALUES

_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device, torch.qscheme)


class Hidden(Exception):
    """A trace may depend on something that cannot be read; the message says what."""


class ValueWriter(ABC):
    """Serializes values to text."""

    def __init__(self) -> None:
        self._scope = ""
        self._where = ""
        self._tolerant = False
        """Write objects that cannot be read by class instead of raising Hidden: inside libraries, which are identified
        by their versions."""
        self._count = 0
        self._bytes = 0
        self._seen: dict[tuple[int, bool], str] = {}
        """Names of written objects, by (id, tolerant)."""
        self._labels: collections.Counter[str] = collections.Counter()
        self._kept: list[object] = []
        """Keeps the objects in `_seen` alive, so that no other object gets their ids."""
        self._class_owners: dict[type, str] = {}

    def write(self, value: Any, scope: str, where: str) -> str:
        """Serialize a value. `scope` prefixes the names of new objects, `where` is for error messages."""
        before = self._scope, self._where, self._tolerant
        self._scope, self._where, self._tolerant = scope, where, False
        try:
            return self._value(value)
        finally:
            self._scope, self._where, self._tolerant = before

    @abstractmethod
    def _tensor(self, tensor: torch.Tensor) -> str:
        """Serialize a tensor."""

    @abstractmethod
    def _module(self, module: nn.Module) -> str:
        """Serialize an nn.Module."""

    @abstractmethod
    def _function(self, value: types.FunctionType) -> str:
        """Serialize a Python function."""

    @abstractmethod
    def _class(self, cls: type, constructed: bool = False) -> str:
        """Write the label of a class; `constructed`: code may create new instances of it."""

    @abstractmethod
    def _library_module(self, module: types.ModuleType) -> str:
        """Serialize a Python module that is used as a value."""

    @abstractmethod
    def _builtin(self, name: str, as_value: bool = False) -> None:
        """Raise Hidden if a builtin function depends on state that a key cannot include."""

    @abstractmethod
    def _allowed(self, owner: str, module: str | None, name: str) -> None:
        """Raise Hidden if a name of a library module depends on state that a key cannot include."""

    def _class_owner(self, cls: type) -> str:
        known = self._class_owners.get(cls)
        if known is None:
            known = self._class_owners[cls] = owner_of_class(cls)
        return known

    def _value(self, value: Any) -> str:
        kind = type(value)
        if kind is str or kind is int or kind is bool or value is None:
            return repr(value)
        self._count += 1
        if self._count > KEY_VALUES:
            raise Hidden(f"{self._where} contains more than {KEY_VALUES} values, which are too many to read")
        if kind is float or kind is complex:
            return number(value)
        if kind in _NAMED or value is Ellipsis or value is NotImplemented:
            return str(value)
        if kind is tuple or kind is torch.Size:
            return f"{kind.__name__}({','.join(map(self._value, self._short(value)))})"
        special = _SPECIAL_OF.get(id(kind))
        if special is not None:
            return special(self, value)
        form = form_of(kind)
        if form.sort is Sort.TENSOR:
            return self._tensor(value)
        known = self._seen.get((id(value), self._tolerant))
        if known is not None:
            return "=" + known
        if form.sort is Sort.MODULE:
            return self._module(value)
        if form.sort is Sort.CLASS:
            return self._class(value, constructed=True)
        mro = mro_of(kind)
        if types.ModuleType in mro:
            return self._library_module(value)
        if torch.Tensor in mro:
            return self._opaque(kind, "is a tensor of another class")
        return self._instance(value, form)

    def _opaque(self, kind: type, why: str) -> str:
        name = full_name(kind)
        if self._tolerant:
            return f"?{name}"
        raise Hidden(f"{self._where}: a {name} {why}")

    def _remember(self, value: object) -> str:
        """Name an object by its scope and its number in it."""
        self._labels[self._scope] += 1
        label = self._seen[id(value), self._tolerant] = f"{self._scope}#{self._labels[self._scope]}"
        self._kept.append(value)
        return label

    def _short(self, container: Any) -> Any:
        if len(container) > KEY_ITEMS:
            raise Hidden(f"{self._where}: a {type(container).__name__} of {len(container)} values is too long to read")
        return container

    def _list(self, value: Any) -> str:
        return self._shared(value) or self._items(value, list)

    def _dict(self, value: Any) -> str:
        return self._shared(value) or self._items(value, dict)

    def _set(self, value: Any) -> str:
        return self._shared(value) or self._items(value, set)

    def _shared(self, value: Any) -> str:
        known = self._seen.get((id(value), self._tolerant))
        if known is not None:
            return "=" + known
        self._remember(value)
        return ""

    def _items(self, value: Any, base: type) -> str:
        """Serialize the contents of a container, bypassing methods that its class overrides."""
        count = base.__len__(value) if base not in NUMBERS else 0  # type: ignore[attr-defined]
        if count > KEY_ITEMS:
            raise Hidden(f"{self._where}: a {base.__name__} of {count} values is too long to read")
        name = base.__name__
        if issubclass(base, dict):
            pairs = dict.items(value) if base is not collections.OrderedDict else collections.OrderedDict.items(value)
            text = ",".join(f"{self._value(key)}:{self._value(item)}" for key, item in pairs)
            if base is collections.defaultdict:
                text += "|" + self._value(value.default_factory)
            return f"{name}{{{text}}}"
        if base in (set, frozenset):
            items = list(base.__iter__(value))
            texts = sorted(map(self._value, items))
            # sets of ints iterate in the same order in every process, sets of strings do not
            order = ",".join(map(repr, items)) if all(type(item) is int for item in items) else ""
            return f"{name}{{{','.join(texts)}|{order}}}"
        if base in NUMBERS:
            return number(base.__pos__(value)) if base is not int else int.__repr__(value)
        if base is str:
            return str.__repr__(value)
        if base is bytes:
            return self._raw(bytes.__add__(value, b""))
        text = ",".join(map(self._value, base.__iter__(value)))  # type: ignore[attr-defined]
        if base is collections.deque:
            text += f"|{value.maxlen}"
        return f"{name}[{text}]"

    def _raw(self, value: bytes | bytearray | memoryview) -> str:
        self._bytes += len(value)
        if self._bytes > KEY_BYTES:
            raise Hidden(f"{self._where}: more than {KEY_BYTES >> 20} MiB of data that are not parameters or buffers")
        return f"raw {len(value)} {hashlib.sha256(value).hexdigest()}"

    def _instance(self, value: Any, form: Form) -> str:
        """Serialize an object: its class, its items if it is a container, its attributes and slots."""
        kind = form.kind
        if kind.__module__.split(".")[0] == "numpy":
            if form.sort is Sort.ARRAY or form.sort is Sort.SCALAR:
                return self._array(value)
            if np.dtype in mro_of(kind):
                return f"numpy.dtype {value.str} {self._value(value.descr)}"
        owner = self._class_owner(kind)
        if owner and not self._tolerant:
            self._allowed(owner, kind.__module__, kind.__qualname__)
        if form.hidden:
            return self._opaque(kind, form.hidden)
        self._remember(value)
        parts = [self._class(kind)]
        if form.base is not None:
            parts.append(self._items(value, form.base))
        ignored = IGNORED.get((kind.__module__, kind.__qualname__), ())
        parts += [f"{name!r}={self._value(item)}" for name, item in form.named(value) if name not in ignored]
        return f"<{' '.join(parts)}>"

    def _array(self, value: Any) -> str:
        if value.dtype.hasobject:
            return self._opaque(type(value), "holds Python objects")
        if value.nbytes > KEY_BYTES:
            raise Hidden(
                f"{self._where}: an array of {value.nbytes} bytes is too large to read (at most {KEY_BYTES >> 20} MiB "
                "in all); make it a buffer of the module"
            )
        return f"{type(value).__name__} {value.dtype.str} {value.shape} {self._raw(value.tobytes())}"

    def _made_of(self, value: Any) -> str:
        """Serialize an object of Python itself by its components."""
        kind = type(value)
        return f"{kind.__name__}({','.join(self._value(part) for _, part in PARTS[kind](value))})"

    def _weak(self, value: Any) -> str:
        target = value()
        self._kept.append(target)
        return f"weak({self._value(target)})"

    def _cell(self, value: Any) -> str:
        try:
            return self._value(value.cell_contents)
        except ValueError:
            return "empty"

    def _lru_cache(self, value: Any) -> str:
        inner = value.__wrapped__
        if type(inner) is types.FunctionType and owner_of_function(inner) == USER:
            return self._opaque(type(value), f"({inner.__qualname__}) caches results between calls")
        return f"cached({self._value(inner)})"

    def _c_function(self, value: Any) -> str:
        holder = value.__self__
        home = getattr(value, "__module__", None)
        name = f"{home}.{value.__qualname__}"
        if holder is None or types.ModuleType in mro_of(type(holder)):
            module = home or ("" if holder is None else module_name(holder))
            if module == "builtins":
                self._builtin(value.__name__, as_value=True)
            elif not self._tolerant:
                self._allowed(owner_of_name(module), module, value.__qualname__)
            return f"builtin {name}"
        return f"builtin {name} of {self._value(holder)}"

    def _c_descriptor(self, value: Any) -> str:
        return (
            f"{type(value).__name__} {value.__objclass__.__module__}.{value.__objclass__.__qualname__}.{value.__name__}"
        )

    def _operator(self, value: Any) -> str:
        """Serialize an operator of torch, ``torch.ops.aten.relu``."""
        packet = value if isinstance(value, torch._ops.OpOverloadPacket) else value.overloadpacket
        name = packet._qualified_op_name
        if name.split("::")[0] not in allowlists.OPERATORS:
            raise Hidden(f"{self._where}: the code of the custom operator {name} cannot be read")
        return f"operator {name} {getattr(value, '_overloadname', '')}"

    def _logger(self, value: logging.Logger) -> str:
        return f"logger {value.name!r}"

    def _pattern(self, value: re.Pattern[Any]) -> str:
        return f"pattern {value.pattern!r} {value.flags}"


_MADE_OF = (types.MethodType, functools.partial, functools.cached_property, property, staticmethod, classmethod, slice,
            types.MappingProxyType, types.GenericAlias, types.UnionType, operator.itemgetter)  # fmt: skip
_SPECIAL: dict[type, Callable[[ValueWriter, Any], str]] = {
    list: ValueWriter._list,
    dict: ValueWriter._dict,
    set: ValueWriter._set,
    frozenset: lambda self, value: self._items(value, frozenset),
    collections.OrderedDict: lambda self, value: self._shared(value) or self._items(value, collections.OrderedDict),
    collections.defaultdict: lambda self, value: self._shared(value) or self._items(value, collections.defaultdict),
    collections.deque: lambda self, value: self._shared(value) or self._items(value, collections.deque),
    bytes: ValueWriter._raw,
    bytearray: lambda self, value: self._shared(value) or f"bytearray {self._raw(value)}",
    range: lambda self, value: repr(value),
    types.FunctionType: lambda self, value: self._function(value),
    CACHED: ValueWriter._lru_cache,
    weakref.ReferenceType: ValueWriter._weak,
    re.Pattern: ValueWriter._pattern,
    logging.Logger: ValueWriter._logger,
    torch._ops.OpOverloadPacket: ValueWriter._operator,
    torch._ops.OpOverload: ValueWriter._operator,
    **dict.fromkeys(C_FUNCTIONS, ValueWriter._c_function),
    **dict.fromkeys(C_DESCRIPTORS, ValueWriter._c_descriptor),
    **dict.fromkeys(_MADE_OF, ValueWriter._made_of),
}
_SPECIAL_OF = {id(kind): write for kind, write in _SPECIAL.items()}
"""By id, since a metaclass may define ``__eq__`` and ``__hash__``."""
