"""Python values as text: equal texts for values that a trace cannot tell apart.

Nothing of the user's is run: no property, no ``__getattr__``, no ``__eq__``, no ``__repr__``. Containers, objects with
attributes and slots, and arrays are written down; what has a state that Python does not show raises
Hidden. Mutable objects that occur twice are written once, and named the second time; so are cycles.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import logging
import operator
import re
import sys
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rannd.graph.fingerprint import allowlists
from rannd.graph.fingerprint.bytecode import number
from rannd.graph.fingerprint.introspect import HEAP_TYPE, attributes_of, full_name, module_name, mro_of, vars_of
from rannd.graph.fingerprint.provenance import USER, owner_of_class, owner_of_function, owner_of_name

MOST_BYTES = 16 * 2**20
"""Bytes of tensors, arrays and byte strings that are read, in sum."""

MOST_VALUES = 1_000_000
"""Values that are written down, in sum."""

CACHED = type(functools.lru_cache(len))
"""The class of functions that remember their results."""

_Named = collections.namedtuple("_Named", "field")
C_DESCRIPTORS: frozenset[type] = frozenset(
    {types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
     types.GetSetDescriptorType, types.MemberDescriptorType, type(vars(_Named)["field"])}
)  # fmt: skip
"""What C classes have in the place of methods and attributes."""

_C_FUNCTIONS = frozenset({types.BuiltinFunctionType, types.MethodWrapperType})
_NAMED = (torch.dtype, torch.layout, torch.memory_format, torch.device, torch.qscheme)
TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
"""The classes whose tensors are nothing but tensors."""

_CONTAINERS = (list, tuple, dict, set, frozenset, int, float, complex, str, bytes, collections.OrderedDict,
               collections.defaultdict, collections.deque)  # fmt: skip
Layout = tuple[type | None, tuple[tuple[str, Any], ...], bool]
"""(base container, slots, whether there are attributes) of the instances of a class."""


class Hidden(Exception):
    """Something that a trace may depend on cannot be seen."""


class ValueWriter(ABC):
    """Writes values down."""

    def __init__(self) -> None:
        self._scope = ""
        self._where = ""
        self._tolerant = False
        """Whether what cannot be seen counts by its class: inside libraries, which count by their versions."""
        self._count = 0
        self._bytes = 0
        self._seen: dict[tuple[int, bool], str] = {}
        """Names of objects, for each tolerance."""
        self._labels: collections.Counter[str] = collections.Counter()
        self._kept: list[object] = []
        """Keeps what is in `_seen` alive, and so its identity its own."""
        self._layouts: dict[type, Layout] = {}
        self._class_owners: dict[type, str] = {}

    def write(self, value: Any, scope: str, where: str) -> str:
        """The text of a value. `scope` names new objects in the texts, `where` is for messages."""
        before = self._scope, self._where, self._tolerant
        self._scope, self._where, self._tolerant = scope, where, False
        try:
            return self._value(value)
        finally:
            self._scope, self._where, self._tolerant = before

    @abstractmethod
    def _tensor(self, tensor: torch.Tensor) -> str:
        """A tensor that occurs in Python."""

    @abstractmethod
    def _module(self, module: nn.Module) -> str:
        """A module of torch that occurs in Python."""

    @abstractmethod
    def _function(self, value: types.FunctionType) -> str:
        """A Python function."""

    @abstractmethod
    def _class(self, cls: type, constructed: bool = False) -> str:
        """A class, by its label; `constructed` where code may make new instances of it."""

    @abstractmethod
    def _library_module(self, module: types.ModuleType) -> str:
        """A module of Python code that occurs as a value."""

    @abstractmethod
    def _builtin(self, name: str, as_value: bool = False) -> None:
        """Hidden where a builtin function reads what no key can see."""

    @abstractmethod
    def _allowed(self, owner: str, module: str | None, name: str) -> None:
        """Hidden where something in a library's module reads what no key can see."""

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
        if self._count > MOST_VALUES:
            raise Hidden(f"{self._where} holds more than {MOST_VALUES} values")
        if kind is float or kind is complex:
            return number(value)
        if kind in _NAMED or value is Ellipsis or value is NotImplemented:
            return str(value)
        if kind is tuple or kind is torch.Size:
            return f"{kind.__name__}({','.join(map(self._value, self._short(value)))})"
        special = _SPECIAL.get(kind)
        if special is not None:
            return special(self, value)
        if kind in TENSORS:
            return self._tensor(value)
        known = self._seen.get((id(value), self._tolerant))
        if known is not None:
            return "=" + known
        mro = mro_of(kind)
        if nn.Module in mro:
            return self._module(value)
        if type in mro:
            return self._class(value, constructed=True)
        if types.ModuleType in mro:
            return self._library_module(value)
        if torch.Tensor in mro:
            return self._opaque(kind, "is a tensor of another class")
        return self._instance(value, kind)

    def _opaque(self, kind: type, why: str) -> str:
        name = full_name(kind)
        if self._tolerant:
            return f"?{name}"
        raise Hidden(f"{self._where}: a {name} {why}")

    def _remember(self, value: object) -> str:
        """Give a name to an object: the scope, and its number there."""
        self._labels[self._scope] += 1
        label = self._seen[id(value), self._tolerant] = f"{self._scope}#{self._labels[self._scope]}"
        self._kept.append(value)
        return label

    def _short(self, container: Any) -> Any:
        if len(container) > allowlists.LONGEST:
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
        """The contents of a container, whatever its class overrides."""
        count = base.__len__(value) if base not in _NUMBERS else 0  # type: ignore[attr-defined]
        if count > allowlists.LONGEST:
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
            # the order of numbers is the same in every process, that of texts is not
            order = ",".join(map(repr, items)) if all(type(item) is int for item in items) else ""
            return f"{name}{{{','.join(texts)}|{order}}}"
        if base in _NUMBERS:
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
        if self._bytes > MOST_BYTES:
            raise Hidden(f"{self._where}: more than {MOST_BYTES >> 20} MiB of data that are not parameters or buffers")
        return f"raw {len(value)} {hashlib.sha256(value).hexdigest()}"

    def _instance(self, value: Any, kind: type) -> str:
        """An object: its class, what it holds as a container, its slots and attributes."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and kind.__module__.split(".")[0] == "numpy":
            if kind is numpy.ndarray or numpy.generic in mro_of(kind):
                return self._array(value)
            if numpy.dtype in mro_of(kind):
                return f"numpy.dtype {value.str} {self._value(value.descr)}"
        owner = self._class_owner(kind)
        if owner and not self._tolerant:
            self._allowed(owner, kind.__module__, kind.__qualname__)
        layout = self._layout(kind)
        if isinstance(layout, str):
            return self._opaque(kind, layout)
        self._remember(value)
        base, slots, attributes = layout
        parts = [self._class(kind)]
        if base is not None:
            parts.append(self._items(value, base))
        for name, slot in slots:
            try:
                parts.append(f"{name}={self._value(slot.__get__(value))}")
            except AttributeError:
                parts.append(f"{name} unset")
        if attributes:
            ignored = allowlists.IGNORED.get((kind.__module__, kind.__qualname__), ())
            for name, item in attributes_of(value).items():
                if name not in ignored:
                    parts.append(f"{name!r}={self._value(item)}")
        return f"<{' '.join(parts)}>"

    def _layout(self, kind: type) -> Layout | str:
        """(base container, slots, whether there is a dict) of a class, or why its instances cannot be seen."""
        known = self._layouts.get(kind)
        if known is not None:
            return known
        base: type | None = None
        slots: list[tuple[str, Any]] = []
        for cls in mro_of(kind):
            if not cls.__flags__ & HEAP_TYPE:
                if cls in _CONTAINERS:
                    base = base or cls
                elif cls is not object and not (base is not None and issubclass(base, cls)):
                    return "has a state that cannot be seen"
                continue
            if cls in _CONTAINERS:
                base = base or cls
                continue
            own = [(n, d) for n, d in vars_of(cls).items() if type(d) is types.MemberDescriptorType]
            slots += own
            under = cls.__base__ or object
            words = len(own)
            words += cls.__weakrefoffset__ > 0 and under.__weakrefoffset__ <= 0
            inside = cls.__dictoffset__ > 0 or cls.__itemsize__ > 0  # otherwise the dict lies before the object
            words += inside and under.__dictoffset__ == 0 != cls.__dictoffset__
            if cls.__basicsize__ > under.__basicsize__ + 8 * words:
                return "has a state that cannot be seen"
        found = self._layouts[kind] = (base, tuple(slots), kind.__dictoffset__ != 0)
        return found

    def _array(self, value: Any) -> str:
        if value.dtype.hasobject:
            return self._opaque(type(value), "holds Python objects")
        if value.nbytes > MOST_BYTES:
            raise Hidden(f"{self._where}: an array of {value.nbytes} bytes is too large to read")
        return f"{type(value).__name__} {value.dtype.str} {value.shape} {self._raw(value.tobytes())}"

    def _partial(self, value: functools.partial[Any]) -> str:
        texts = map(self._value, (value.func, value.args, value.keywords, value.__dict__))
        return f"partial({','.join(texts)})"

    def _method(self, value: types.MethodType) -> str:
        return f"method({self._value(value.__self__)},{self._value(value.__func__)})"

    def _weak(self, value: Any) -> str:
        target = value()
        self._kept.append(target)
        return f"weak({self._value(target)})"

    def _cell(self, value: Any) -> str:
        try:
            return self._value(value.cell_contents)
        except ValueError:
            return "empty"

    def _property(self, value: Any) -> str:
        return f"property({','.join(map(self._value, (value.fget, value.fset, value.fdel)))})"

    def _wrapper(self, value: Any) -> str:
        return f"{type(value).__name__}({self._value(value.__func__)})"

    def _cached_property(self, value: Any) -> str:
        return f"cached_property({value.attrname!r},{self._value(value.func)})"

    def _lru_cache(self, value: Any) -> str:
        inner = value.__wrapped__
        if type(inner) is types.FunctionType and owner_of_function(inner) == USER:
            return self._opaque(type(value), f"({inner.__qualname__}) keeps results from call to call")
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
        """One of torch's operators, ``torch.ops.aten.relu``."""
        packet = value if isinstance(value, torch._ops.OpOverloadPacket) else value.overloadpacket
        name = packet._qualified_op_name
        if name.split("::")[0] not in allowlists.OPERATORS:
            raise Hidden(f"{self._where}: the code of the custom operator {name} cannot be seen")
        return f"operator {name} {getattr(value, '_overloadname', '')}"

    def _logger(self, value: logging.Logger) -> str:
        return f"logger {value.name!r}"

    def _pattern(self, value: re.Pattern[Any]) -> str:
        return f"pattern {value.pattern!r} {value.flags}"

    def _alias(self, value: Any) -> str:
        origin = getattr(value, "__origin__", None)
        return f"alias({self._value(origin)},{','.join(map(self._value, value.__args__))})"


_NUMBERS = (int, float, complex)
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
    slice: lambda self, value: f"slice{self._value((value.start, value.stop, value.step))}",
    types.FunctionType: lambda self, value: self._function(value),
    types.MethodType: ValueWriter._method,
    functools.partial: ValueWriter._partial,
    functools.cached_property: ValueWriter._cached_property,
    CACHED: ValueWriter._lru_cache,
    property: ValueWriter._property,
    staticmethod: ValueWriter._wrapper,
    classmethod: ValueWriter._wrapper,
    weakref.ReferenceType: ValueWriter._weak,
    re.Pattern: ValueWriter._pattern,
    types.GenericAlias: ValueWriter._alias,
    types.UnionType: ValueWriter._alias,
    logging.Logger: ValueWriter._logger,
    types.MappingProxyType: lambda self, value: f"proxy {self._items(dict(value), dict)}",
    types.SimpleNamespace: lambda self, value: self._shared(value) or f"namespace {self._value(vars(value))}",
    torch._ops.OpOverloadPacket: ValueWriter._operator,
    torch._ops.OpOverload: ValueWriter._operator,
    operator.itemgetter: lambda self, value: self._value(value.__reduce__()[1]),
    **dict.fromkeys(_C_FUNCTIONS, ValueWriter._c_function),
    **dict.fromkeys(C_DESCRIPTORS, ValueWriter._c_descriptor),
}
