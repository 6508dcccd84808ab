"""Attribute names that the code of a model reads; other attributes cannot influence what it computes."""

from __future__ import annotations

import functools
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from rannd.graph.fingerprint.bytecode import facts_of
from rannd.graph.fingerprint.object_reader import modules_of, walk

_NOT_FOLLOWED = frozenset({"torch", "numpy", "builtins", *sys.stdlib_module_names})
"""Packages whose functions read no user-defined attributes by name. Only their module classes are followed."""
_CALLING = (nn.Module._call_impl, nn.Module._wrapped_call_impl)
"""Methods that run in every call of a module."""
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
              site.getusersitepackages())  # fmt: skip
_BASE = frozenset(nn.Module.__mro__)
UNCALLED = "_rannd_uncalled"
"""Attribute of a class: names of its methods that forward does not call, and that would raise."""


class Mentions:
    """Names in the code of a model's classes, in the functions that they call by a global name, and in string values.

    An attribute that is only assigned, for example in a constructor, is not included.

    Follows all methods of the module classes up to nn.Module, of user and library classes alike, and those of objects
    and functions in attributes of modules. If user code accesses attributes by names that are not constants, every
    name counts as read. Not found are names that library code composes, and names in library helpers outside of the
    file of the class that calls them; nor those of the methods that a class lists in `UNCALLED`. Runs no user code.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {name for function in _CALLING for name in facts_of(function.__code__).reads}
        self._any = False
        self._seen: set[int] = set()
        self._waiting: list[object] = []
        modules = list(modules_of(model))
        kinds = [type(module) for _, module in modules]
        for kind in kinds:
            if UNCALLED in kind.__dict__:
                self._class(kind)
                self._seen |= {id(each) for each in kind.__mro__}  # which super() in a method leads to, too
        self._waiting += kinds
        for held in walk(modules):
            self._value(held.value, held.opened)
        while self._waiting:
            found = self._waiting.pop()
            if id(found) not in self._seen:
                self._seen.add(id(found))
                if isinstance(found, types.FunctionType):
                    self._function(found)
                elif isinstance(found, type):
                    self._class(found)

    def __contains__(self, name: object) -> bool:
        return self._any or name in self._names

    def _value(self, value: Any, opened: bool) -> None:
        """Collect the code that an object refers to."""
        kind = type(value)
        if kind is str:
            self._names.add(value)
        elif kind is types.FunctionType or issubclass(kind, type):
            self._waiting.append(value)
        elif kind.__module__.partition(".")[0] not in _NOT_FOLLOWED:
            self._waiting.append(kind)

    def _class(self, kind: type) -> None:
        uncalled = kind.__dict__.get(UNCALLED, ())
        for base in kind.__mro__:
            if base not in _BASE and (base.__module__ != "builtins"):
                for name, value in base.__dict__.items():
                    if name not in uncalled:
                        self._waiting += _functions(value)

    def _function(self, function: types.FunctionType) -> None:
        facts = facts_of(function.__code__)
        self._names |= facts.reads
        if facts.dynamic and not _is_library(function):
            self._any = True
        for cell in function.__closure__ or ():
            try:
                self._follow(cell.cell_contents, function)
            except ValueError:  # the cell is empty
                continue
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._follow(value, function)
        for name, *attributes in facts.chains:
            read: Any = function.__globals__.get(name)
            for attribute in attributes:
                if not issubclass(type(read), types.ModuleType):
                    break
                read = read.__dict__.get(attribute)
            self._follow(read, function)

    def _follow(self, value: Any, user: types.FunctionType) -> None:
        """Follow a function or class that the code of `user` refers to, or the class of an object.

        Library helpers are followed only within the file of their caller: following every reference of a library
        would include all of it, with almost every name.
        """
        library = _is_library(user)
        for each in (value, *_functions(value)):
            found = each if issubclass(type(each), (types.FunctionType, type)) else type(each)
            home = str(found.__module__)
            if home.partition(".")[0] not in _NOT_FOLLOWED and (not library or home == user.__module__):
                self._waiting.append(found)


def _is_library(function: types.FunctionType) -> bool:
    return function.__code__.co_filename.startswith(_LIBRARIES)


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions of a class member: of a method, property, partial or cached_property."""
    kind = type(value)
    if kind is types.FunctionType:
        yield value
    elif issubclass(kind, (staticmethod, classmethod, types.MethodType)):
        yield from _functions(value.__func__)
    elif issubclass(kind, property):
        for each in (value.fget, value.fset, value.fdel):
            yield from _functions(each)
    elif issubclass(kind, (functools.partial, functools.partialmethod, functools.cached_property)):
        yield from _functions(value.func)
