"""Read the contents of any Python object without running user code.

No ``__getattr__``, property, ``__eq__``, ``__iter__`` or metaclass is called. All code that inspects the objects of a
model uses this file, so that each purpose sees the same state:

==============================  =================================================================
cache key of a trace            rannd.graph.fingerprint.value_writer, module_writer
guard of a call                 rannd.graph.python_state.snapshot
undoing side effects            rannd.graph.modules.contained_objects
attribute names that code reads rannd.graph.modules.attribute_reads
tensors in attributes           rannd.runtime.parameters.tensor_swap
==============================  =================================================================

Which part of the state counts, and the limits for each purpose, are in `state_rules.py`.
"""

from __future__ import annotations

import collections
import functools
import gc
import logging
import operator
import random
import re
import struct
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from rannd.graph.fingerprint.allowlists import HARMLESS
from rannd.graph.fingerprint.introspect import HEAP_TYPE, cells, mro_of, vars_of
from rannd.graph.fingerprint.state_rules import (
    GUARD_ITEMS,
    GUARD_LEVELS,
    HOOK_FLAGS,
    IGNORED_OF_FUNCTIONS,
    INTERNAL,
    TENSORS,
    UNDO_VALUES,
    class_of,
)

CACHED = type(functools.lru_cache(len))
"""The class of functions decorated with functools.lru_cache."""
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
"""Classes of random number generators."""
NUMBERS = (int, float, complex)

_Named = collections.namedtuple("_Named", "field")
C_DESCRIPTORS: frozenset[type] = frozenset(
    {types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
     types.GetSetDescriptorType, types.MemberDescriptorType, type(vars(_Named)["field"])}
)  # fmt: skip
"""Types of the methods and attributes of classes implemented in C."""
C_FUNCTIONS = frozenset({types.BuiltinFunctionType, types.MethodWrapperType})

_BASES = (torch.Size, list, tuple, dict, set, frozenset, int, float, complex, str, bytes, bytearray,
          collections.OrderedDict, collections.defaultdict, collections.deque)  # fmt: skip
"""Built-in classes whose instances, and those of their subclasses, can be read."""
_UNSEEN = "has state that cannot be read from Python"
_MOST_FORMS = 5_000
"""Maximum number of cached `Form` objects."""


class Sort(Enum):
    """Category of an object, which determines how it is read."""

    SCALAR = "a number, string, bytes or singleton, compared by its content"
    TENSOR = "an instance of one of torch's own tensor classes"
    ARRAY = "a numpy array"
    GENERATOR = "a random number generator"
    MODULE = "an nn.Module"
    CLASS = "a class"
    FUNCTION = "a Python function: its code and its closure"
    PARTS = "an object of Python itself that is compared by its components: a partial, a method"
    OBJECT = "an object with items, slots or attributes"
    ALONE = "an object that is compared by identity only"


class Form:
    """Describes how to read the instances of one class."""

    __slots__ = ("attributes", "base", "closed", "content", "exact", "extra", "hidden", "items", "kind", "mapping",
                 "parts", "size", "slots", "sort")  # fmt: skip

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.hidden = ""
        """Why part of their state cannot be read; empty if all of it can."""
        self.base: type | None = None
        """The built-in class that they inherit content from: a container, a number or a string."""
        self.slots: tuple[tuple[str, Any], ...] = ()
        self.attributes: Any = None
        """The descriptor of their `__dict__`."""
        self.content: Callable[[Any], Any] | None = None
        """For SCALAR: returns the content in a form that can be compared."""
        self.parts: Callable[[Any], Iterable[tuple[str, Any]]] | None = None
        """For PARTS and FUNCTION: returns the components."""
        self.items: Any = None
        """For containers: iterates over the items, or the values of a dict."""
        self.size: Any = None
        self.extra: Callable[[Any], Any] | None = None
        """For containers: returns state beside the items (default_factory, maxlen)."""
        self.mapping = False
        """Whether they are dicts."""
        self.exact = False
        """Whether a container has no state beside its contents."""
        self._find_layout(mro_of(kind))
        self.sort = self._sort(mro_of(kind))
        self.closed = GUARD_LEVELS
        """The guard reads their contents only at a depth below this, counted from a module's attribute."""
        if self.sort in (Sort.OBJECT, Sort.MODULE) and not self.exact:
            self.closed = _depth_limit(kind, self.sort)

    def _sort(self, mro: tuple[type, ...]) -> Sort:
        kind = self.kind
        self.parts = _PARTS_OF.get(id(kind))
        self.content = _CONTENTS_OF.get(id(kind)) or (np.generic.tobytes if _below(mro, np.generic) else None)
        if self.content is not None:
            return Sort.SCALAR
        if kind is types.FunctionType:
            return Sort.FUNCTION
        if self.parts is not None:
            return Sort.PARTS
        if any(class_of(kind) is each for each in TENSORS):
            return Sort.TENSOR
        if kind is np.ndarray:
            return Sort.ARRAY
        if _below(mro, *GENERATORS):
            return Sort.GENERATOR
        if _below(mro, nn.Module):
            return Sort.MODULE
        if _below(mro, type):
            return Sort.CLASS
        if _below(mro, torch.Tensor, np.ndarray, types.ModuleType, *_ATOMS):
            return Sort.ALONE
        return Sort.OBJECT if self.items is not None or self.slots or self.attributes is not None else Sort.ALONE

    def _find_layout(self, mro: tuple[type, ...]) -> None:
        slots: list[tuple[str, Any]] = []
        for cls in mro:
            own = vars_of(cls)
            if self.attributes is None and type(own.get("__dict__")) in _DESCRIPTORS:
                self.attributes = own["__dict__"]
            if _below((cls,), *_BASES):
                self.base = self.base or cls
            elif not cls.__flags__ & HEAP_TYPE:
                known = cls is object or cls is types.SimpleNamespace  # a SimpleNamespace has only its attributes
                if not known and not (self.base is not None and _below(mro_of(self.base), cls)):
                    self.hidden = self.hidden or _UNSEEN
            else:
                members = [(name, each) for name, each in own.items() if type(each) is types.MemberDescriptorType]
                slots += members
                if _has_c_fields(cls, len(members)):
                    self.hidden = self.hidden or _UNSEEN
        self.slots = tuple(slots)
        if self.kind.__dictoffset__ and self.attributes is None:
            self.hidden = self.hidden or _UNSEEN  # user code has replaced __dict__ by a property
        base = self.base
        if base is not None and not issubclass(base, (*NUMBERS, str, bytes, bytearray)):
            self.mapping = issubclass(base, dict)
            self.size = base.__len__  # type: ignore[attr-defined]
            self.items = collections.OrderedDict.values if base is collections.OrderedDict else (
                dict.values if issubclass(base, dict) else base.__iter__  # type: ignore[attr-defined]
            )  # fmt: skip
            bare = issubclass(base, tuple) and self.attributes is None and not slots and not self.hidden
            self.exact = self.kind is base or bare
            if base is collections.defaultdict:
                self.extra = operator.attrgetter("default_factory") if self.kind is base else None
            elif base is collections.deque:
                self.extra = vars_of(collections.deque)["maxlen"].__get__

    def keys(self, value: Any) -> Iterator[Any]:
        """Iterate over the keys of a dict."""
        return iter(collections.OrderedDict.keys(value) if self.base is collections.OrderedDict else dict.keys(value))

    def copy(self, value: Any) -> Any:
        """Copy the content of a container to a dict or a list."""
        if self.mapping:
            return dict(zip(self.keys(value), self.items(value), strict=True))
        return list(self.items(value))

    def named(self, value: Any) -> list[tuple[str, Any]]:
        """List (name, value) of the attributes, including slots that are set."""
        found = list(dict.items(self.attributes.__get__(value))) if self.attributes is not None else []
        for name, slot in self.slots:
            try:
                found.append((name, slot.__get__(value)))
            except AttributeError:  # the slot is empty
                continue
        return found


def _below(mro: tuple[type, ...], *classes: type) -> bool:
    """Whether one of the classes is in `mro`; compared by identity, since a metaclass may define ``__eq__``."""
    return any(each is cls for each in mro for cls in classes)


def _has_c_fields(cls: type, slots: int) -> bool:
    """Whether instances have C fields beside slots, `__dict__` and `__weakref__`, judging by their size."""
    under = cls.__base__ or object
    words = slots + (cls.__weakrefoffset__ > 0 and under.__weakrefoffset__ <= 0)
    inside = cls.__dictoffset__ > 0 or cls.__itemsize__ > 0  # otherwise the dict is stored before the object
    words += inside and under.__dictoffset__ == 0 != cls.__dictoffset__
    return cls.__basicsize__ > under.__basicsize__ + 8 * words


def _depth_limit(kind: type, sort: Sort) -> int:
    """Depth limit for reading objects of a class.

    Objects of torch, numpy and the standard library are read only directly in an attribute, those of rannd nowhere.
    """
    module = kind.__module__
    home = module if type(module) is str else "?"
    top = home.partition(".")[0]
    if top in ("rannd", "pyrannc"):
        return 0
    machinery = top in ("torch", "numpy") or (top in sys.stdlib_module_names and top not in HARMLESS | {"argparse"})
    return 1 if machinery and sort is Sort.OBJECT and top != "__main__" else GUARD_LEVELS


_forms: dict[int, Form] = {}


def form_of(kind: type) -> Form:
    """Return the Form of a class; cached."""
    known = _forms.get(id(kind))
    if known is None:
        if len(_forms) > _MOST_FORMS:
            _forms.clear()
        known = _forms[id(kind)] = Form(kind)
    return known


def attributes_of(value: object) -> dict[str, Any]:
    """The ``__dict__`` of an object; empty if it has none."""
    found = form_of(type(value)).attributes
    return {} if found is None else found.__get__(value)


# -- components of Python's own objects ------------------------------------------------------------------------------


def _function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    home = value.__globals__.get("__name__")
    if type(home) is str and home.startswith("rannd."):
        return  # a wrapper that the tracer has put in place of a user function
    for name, inner in (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__)):
        if inner:
            yield name, inner
    if value.__closure__:
        yield from cells(value)
    own = value.__dict__
    if not IGNORED_OF_FUNCTIONS.isdisjoint(own):
        own = {name: inner for name, inner in own.items() if name not in IGNORED_OF_FUNCTIONS}
    if own:
        yield "attributes", own


def _cell(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        yield "content", value.cell_contents
    except ValueError:
        return


def _alias(value: Any) -> Iterator[tuple[str, Any]]:
    yield "origin", getattr(value, "__origin__", None)
    yield "arguments", value.__args__


def _holder(value: Any) -> Iterator[tuple[str, Any]]:
    """The object that a C method is bound to: the list for `list.append`."""
    yield "name", value.__qualname__
    yield "holder", value.__self__


def _fields(*names: str) -> Callable[[Any], Iterator[tuple[str, Any]]]:
    def read(value: Any) -> Iterator[tuple[str, Any]]:
        for name in names:
            yield name, getattr(value, name)

    return read


PARTS: dict[type, Callable[[Any], Iterable[tuple[str, Any]]]] = {
    types.FunctionType: _function,
    types.MethodType: _fields("__self__", "__func__"),
    functools.partial: _fields("func", "args", "keywords", "__dict__"),
    functools.partialmethod: _fields("func", "args", "keywords", "__dict__"),
    functools.cached_property: _fields("attrname", "func"),
    CACHED: _fields("__wrapped__"),
    property: _fields("fget", "fset", "fdel"),
    staticmethod: _fields("__func__"),
    classmethod: _fields("__func__"),
    weakref.ReferenceType: lambda value: (("target", value()),),
    types.CellType: _cell,
    types.MappingProxyType: lambda value: (("mapping", gc.get_referents(value)[0]),),
    types.GenericAlias: _alias,
    types.UnionType: _alias,
    slice: _fields("start", "stop", "step"),
    operator.itemgetter: lambda value: (("items", value.__reduce__()[1]),),
    operator.attrgetter: lambda value: (("attributes", value.__reduce__()[1]),),
    operator.methodcaller: lambda value: (("call", value.__reduce__()[1]),),
    **dict.fromkeys(C_FUNCTIONS, _holder),
}
"""For each class of Python's own: a function that yields (name, component) of an instance."""

_PACK = struct.Struct("d").pack
_CONTENTS: dict[type, Callable[[Any], Any]] = {
    bytes: bytes,
    bytearray: bytes,
    complex: lambda value: _PACK(value.real) + _PACK(value.imag),
    re.Pattern: lambda value: (value.pattern, value.flags),
    logging.Logger: lambda value: value.name,
}
_PARTS_OF = {id(kind): read for kind, read in PARTS.items()}
_CONTENTS_OF = {id(kind): read for kind, read in _CONTENTS.items()}
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
_ATOMS = C_DESCRIPTORS | {types.CodeType, types.ModuleType, types.GeneratorType}


# -- walking ---------------------------------------------------------------------------------------------------------


class Held:
    """A value found in a module's attribute, or nested in it."""

    __slots__ = ("depth", "form", "inner", "module", "name", "opened", "value")

    def __init__(self, value: Any, module: str, name: str, inner: str, depth: int) -> None:
        self.value = value
        self.module = module
        """Path of the module that has the attribute."""
        self.name = name
        """Name of the attribute."""
        self.inner = inner
        """Location inside the attribute as a Python expression: ``.scales[0]``."""
        self.depth = depth
        self.form = form_of(type(value))
        self.opened = depth < self.form.closed
        """Whether its contents are read."""

    @property
    def path(self) -> str:
        """Location as a Python expression: ``encoder.config.scales[0]``."""
        return f"{self.module}.{self.name}{self.inner}" if self.module else f"{self.name}{self.inner}"


def walk(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Held]:
    """Yield everything in the attributes of modules, within the limits of the guard of a call; each object once.

    `modules` are (path, module) of all modules of a model. A module found only in an attribute is walked together with
    its submodules. Parameters, buffers and registered submodules are not yielded.
    """
    modules = list(modules)
    deepest: dict[int, int] = {id(module): -1 for _, module in modules}
    kept: list[object] = []
    waiting: collections.deque[Held] = collections.deque()

    def enter(path: str, module: nn.Module) -> None:
        for name, value in attributes_of(module).items():
            if name not in INTERNAL:
                waiting.append(Held(value, path, name, "", 0))
            elif name in HOOK_FLAGS:
                waiting.extend(Held(hook, path, name, f"[{place}]", 0) for place, hook in enumerate(value.values()))

    for path, module in modules:
        enter(path, module)
    while waiting:
        held = waiting.popleft()
        value, form = held.value, held.form
        before = deepest.get(id(value))
        held.opened &= len(deepest) < UNDO_VALUES
        if before is not None and before <= held.depth:
            continue
        deepest[id(value)] = held.depth
        kept.append(value)
        if form.sort is Sort.MODULE:
            for path, module in modules_of(value) if held.opened else ():
                if module is value or deepest.get(id(module), 0) >= 0:
                    deepest[id(module)] = -1
                    inner = f"{held.inner}.{path}" if path else held.inner
                    inside = Held(module, held.module, held.name, inner, held.depth)
                    yield inside
                    enter(inside.path, module)
            continue
        if before is None:
            yield held
        if held.opened:
            for path, inner in _inside(value, form, GUARD_ITEMS[held.depth]):
                waiting.append(Held(inner, held.module, held.name, held.inner + path, held.depth + 1))


def _inside(value: Any, form: Form, most: int) -> Iterator[tuple[str, Any]]:
    """Yield (Python expression, value) for the contents of an object."""
    if form.parts is not None and (form.parts is not _holder or is_bound(value)):
        for name, inner in form.parts(value):
            yield f".{name}", inner
    if form.sort is not Sort.OBJECT:
        return
    if form.items is not None and form.mapping:
        for key, inner in islice(zip(form.keys(value), form.items(value), strict=True), most):
            yield ".keys()", key
            yield f"[{key!r}]" if type(key) in (str, int) else "[...]", inner
    elif form.items is not None:
        for place, inner in enumerate(islice(form.items(value), most)):
            yield f"[{place}]", inner
    for name, inner in form.named(value)[: GUARD_ITEMS[0]]:
        yield f".{name}", inner


def is_bound(value: Any) -> bool:
    """Whether a C function is a method bound to a mutable object."""
    holder = form_of(type(value.__self__))
    return holder.sort not in (Sort.CLASS, Sort.ALONE, Sort.SCALAR) and value.__self__ is not None


def modules_of(model: nn.Module, *, again: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Like `named_modules`, but twice as fast.

    With `again`, a module with two names is yielded under both, its submodules only under the first.
    """
    waiting = [("", model)]
    seen = set()
    while waiting:
        name, module = waiting.pop()
        if id(module) in seen:
            if again:
                yield name, module
            continue
        seen.add(id(module))
        yield name, module
        children = object.__getattribute__(module, "__dict__").get("_modules")
        if children:
            prefix = f"{name}." if name else ""
            waiting += [(prefix + key, child) for key, child in reversed(children.items()) if child is not None]
