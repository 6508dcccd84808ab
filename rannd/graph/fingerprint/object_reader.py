"""How any Python object is read, without running code of its own: what tells it, and what it holds.

No ``__getattr__``, no property, no ``__eq__``, no ``__iter__``, no metaclass. Everybody who looks into the objects of a
model does it with this file, so that what one sees the others see:

==============================  =================================================================
the key of a trace              rannd.graph.fingerprint.value_writer, module_writer
the guard of a call             rannd.graph.modules.snapshot
undo what running code changes  rannd.graph.modules.contained_objects
code that objects bring along   rannd.graph.modules.attribute_reads
tensors in attributes           rannd.runtime.parameters.tensor_swap
==============================  =================================================================

What of it counts, and how far each one reads: `state_rules.py`.
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
from rannd.graph.fingerprint.state_rules import GUARD_ITEMS, GUARD_LEVELS, HOOK_FLAGS, INTERNAL, TENSORS, UNDO_VALUES

CACHED = type(functools.lru_cache(len))
"""The class of functions that remember their results."""
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
"""Sources of random numbers."""
NUMBERS = (int, float, complex)

_Named = collections.namedtuple("_Named", "field")
C_DESCRIPTORS: frozenset[type] = frozenset(
    {types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
     types.GetSetDescriptorType, types.MemberDescriptorType, type(vars(_Named)["field"])}
)  # fmt: skip
"""What C classes have in the place of methods and attributes."""
C_FUNCTIONS = frozenset({types.BuiltinFunctionType, types.MethodWrapperType})

_BASES = (torch.Size, list, tuple, dict, set, frozenset, int, float, complex, str, bytes, bytearray,
          collections.OrderedDict, collections.defaultdict, collections.deque)  # fmt: skip
"""Built-in classes whose instances, and those of classes below them, can be read."""
_UNSEEN = "has a state that cannot be seen"
_MOST_FORMS = 5_000
"""Classes that are remembered."""


class Sort(Enum):
    """What something is, for those who look into it."""

    SCALAR = "a number, a text, bytes, a singleton: told by its content"
    TENSOR = "a tensor of torch's own classes"
    ARRAY = "an array of numpy"
    GENERATOR = "a source of random numbers"
    MODULE = "an nn.Module"
    CLASS = "a class"
    FUNCTION = "a function of Python code: its code, and what it closes over"
    PARTS = "an object of Python's own, told by what it is made of: a partial, a method"
    OBJECT = "what has items, slots or attributes"
    ALONE = "told by its identity alone"


class Form:
    """How the instances of one class are read."""

    __slots__ = ("attributes", "base", "closed", "content", "exact", "extra", "hidden", "items", "kind", "mapping",
                 "parts", "size", "slots", "sort")  # fmt: skip

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.hidden = ""
        """Why a part of their state cannot be seen, where it cannot."""
        self.base: type | None = None
        """The built-in class whose content they have: a container, a number or a text."""
        self.slots: tuple[tuple[str, Any], ...] = ()
        self.attributes: Any = None
        """The descriptor of their `__dict__`."""
        self.content: Callable[[Any], Any] | None = None
        """Of SCALAR: the content, in a form that compares."""
        self.parts: Callable[[Any], Iterable[tuple[str, Any]]] | None = None
        """Of PARTS and FUNCTION: what they are made of."""
        self.items: Any = None
        """Of containers: the items; the values of a dict."""
        self.size: Any = None
        self.extra: Callable[[Any], Any] | None = None
        """Of containers: what belongs to them beside the items."""
        self.mapping = False
        """Whether they are dicts."""
        self.exact = False
        """Whether a container is told by what it holds, and nothing else."""
        self._find_layout(mro_of(kind))
        self.sort = self._sort(mro_of(kind))
        self.closed = GUARD_LEVELS
        """So deep below a module's attribute the guard does not look into them any more."""
        if self.sort in (Sort.OBJECT, Sort.MODULE) and not self.exact:
            self.closed = _closed(kind, self.sort)

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
        if any(kind is each for each in TENSORS):
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
                known = cls is object or cls is types.SimpleNamespace  # which is nothing but its attributes
                if not known and not (self.base is not None and _below(mro_of(self.base), cls)):
                    self.hidden = self.hidden or _UNSEEN
            else:
                members = [(name, each) for name, each in own.items() if type(each) is types.MemberDescriptorType]
                slots += members
                if _more_than(cls, len(members)):
                    self.hidden = self.hidden or _UNSEEN
        self.slots = tuple(slots)
        if self.kind.__dictoffset__ and self.attributes is None:
            self.hidden = self.hidden or _UNSEEN  # a property of the user's is in the place of __dict__
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
        """The keys of a dict."""
        return iter(collections.OrderedDict.keys(value) if self.base is collections.OrderedDict else dict.keys(value))

    def copy(self, value: Any) -> Any:
        """The content of a container, as a dict or a list."""
        if self.mapping:
            return dict(zip(self.keys(value), self.items(value), strict=True))
        return list(self.items(value))

    def named(self, value: Any) -> list[tuple[str, Any]]:
        """The attributes, slots that are filled included."""
        found = list(dict.items(self.attributes.__get__(value))) if self.attributes is not None else []
        for name, slot in self.slots:
            try:
                found.append((name, slot.__get__(value)))
            except AttributeError:  # it is empty
                continue
        return found


def _below(mro: tuple[type, ...], *classes: type) -> bool:
    """Whether one of the classes is in `mro`; by identity, a metaclass may compare in its own way."""
    return any(each is cls for each in mro for cls in classes)


def _more_than(cls: type, slots: int) -> bool:
    """Whether instances have more of their own than slots, `__dict__` and `__weakref__`: something of C."""
    under = cls.__base__ or object
    words = slots + (cls.__weakrefoffset__ > 0 and under.__weakrefoffset__ <= 0)
    inside = cls.__dictoffset__ > 0 or cls.__itemsize__ > 0  # otherwise the dict lies before the object
    words += inside and under.__dictoffset__ == 0 != cls.__dictoffset__
    return cls.__basicsize__ > under.__basicsize__ + 8 * words


def _closed(kind: type, sort: Sort) -> int:
    """How deep objects of a class are looked into: machinery where it is an attribute, our own nowhere."""
    module = kind.__module__
    home = module if type(module) is str else "?"
    top = home.partition(".")[0]
    if top in ("rannd", "pyrannc"):
        return 0
    machinery = top in ("torch", "numpy") or (top in sys.stdlib_module_names and top not in HARMLESS | {"argparse"})
    return 1 if machinery and sort is Sort.OBJECT and top != "__main__" else GUARD_LEVELS


_forms: dict[int, Form] = {}


def form_of(kind: type) -> Form:
    """How instances of a class are read; found once for each."""
    known = _forms.get(id(kind))
    if known is None:
        if len(_forms) > _MOST_FORMS:
            _forms.clear()
        known = _forms[id(kind)] = Form(kind)
    return known


def attributes_of(value: object) -> dict[str, Any]:
    """The attributes of an object in its ``__dict__``; none where there is none."""
    found = form_of(type(value)).attributes
    return {} if found is None else found.__get__(value)


# -- what objects of Python's own are made of ------------------------------------------------------------------------


def _function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    home = value.__globals__.get("__name__")
    if type(home) is str and home.startswith("rannd."):
        return  # what the tracer puts in the place of the user's
    for name, inner in (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__)):
        if inner:
            yield name, inner
    if value.__closure__:
        yield from cells(value)
    if value.__dict__:
        yield "attributes", value.__dict__


def _cell(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        yield "content", value.cell_contents
    except ValueError:
        return


def _alias(value: Any) -> Iterator[tuple[str, Any]]:
    yield "origin", getattr(value, "__origin__", None)
    yield "arguments", value.__args__


def _holder(value: Any) -> Iterator[tuple[str, Any]]:
    """What a method of C is bound to: a list, of its `append`."""
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
"""What an object of Python's own is made of, by its class: (name, part)."""

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
    """Something that a module's attribute holds, at some depth."""

    __slots__ = ("depth", "form", "inner", "module", "name", "opened", "value")

    def __init__(self, value: Any, module: str, name: str, inner: str, depth: int) -> None:
        self.value = value
        self.module = module
        """Path of the module that has the attribute."""
        self.name = name
        """The attribute."""
        self.inner = inner
        """Where in it, as Python writes it: ``.scales[0]``."""
        self.depth = depth
        self.form = form_of(type(value))
        self.opened = depth < self.form.closed
        """Whether it is looked into."""

    @property
    def path(self) -> str:
        """As Python would write it: ``encoder.config.scales[0]``."""
        return f"{self.module}.{self.name}{self.inner}" if self.module else f"{self.name}{self.inner}"


def walk(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[Held]:
    """All that the attributes of the modules hold, as far as the guard of a call looks; each object once.

    `modules` are all of a model, by their paths. Modules that are in attributes only are walked with their own modules;
    parameters, buffers and submodules of no module are.
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
    """What something holds, by how Python would write it."""
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
    """Whether a function of C is a method of an object that may change."""
    holder = form_of(type(value.__self__))
    return holder.sort not in (Sort.CLASS, Sort.ALONE, Sort.SCALAR) and value.__self__ is not None


def modules_of(model: nn.Module, *, again: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """As named_modules, which takes twice as long; `again`: a module that has two names comes by both.

    What is below it comes by the first alone.
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
