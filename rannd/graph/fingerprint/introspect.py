"""Read modules, classes and closures without running user code: no ``__getattr__``, property or metaclass."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

HEAP_TYPE = 1 << 9
"""Flag of classes created at run time (Py_TPFLAGS_HEAPTYPE), as all classes written in Python are."""

_NAMESPACE = vars(types.ModuleType)["__dict__"]
_VARS = type.__dict__["__dict__"]
_MRO = type.__dict__["__mro__"]


def namespace(module: types.ModuleType) -> dict[str, Any]:
    """The globals of a module. Plain attribute access would make lazy modules import others."""
    found: dict[str, Any] = _NAMESPACE.__get__(module)
    return found


def module_name(module: types.ModuleType) -> str:
    """The name of a module, '?' if it has none."""
    name = namespace(module).get("__name__")
    return name if type(name) is str else "?"


def full_name(value: Any) -> str:
    """Module and qualified name of a class or function, from its own attributes."""
    module = vars_of(value).get("__module__") if isinstance(value, type) else value.__module__
    if type(module) is not str and isinstance(value, type):
        module = type.__dict__["__module__"].__get__(value)
    return f"{module if type(module) is str else '?'}.{value.__qualname__}"


def mro_of(cls: type) -> tuple[type, ...]:
    """The method resolution order of a class."""
    found: tuple[type, ...] = _MRO.__get__(cls)
    return found


def vars_of(cls: type) -> Mapping[str, Any]:
    """The namespace of a class."""
    found: Mapping[str, Any] = _VARS.__get__(cls)
    return found


def cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the closure variables of a function, except unbound ones."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue
