"""Which names of attributes the code of a model reads: what none of it reads cannot steer what the model does."""

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
"""Packages whose functions read no attributes of the user's by name. Their classes of modules are looked at."""
_CALLING = (nn.Module._call_impl, nn.Module._wrapped_call_impl)
"""What runs whenever a module is called."""
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
              site.getusersitepackages())  # fmt: skip
_BASE = frozenset(nn.Module.__mro__)


class Mentions:
    """The names in the code of a model's classes, of what they call by a global name, and in strings they hold.

    An attribute that is only written (in a constructor, say) is none of them.

    Of the modules' classes all methods below nn.Module are read, the library's too, and those of the objects and
    functions that modules have as attributes. Where code of the user's reads attributes by names that are not
    constants, every name counts as mentioned. What a library reads by a name that it puts together, or in helpers of
    other files than the class that calls them, is not seen. Runs none of the code.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {name for function in _CALLING for name in facts_of(function.__code__).reads}
        self._any = False
        self._seen: set[int] = set()
        self._waiting: list[object] = []
        modules = list(modules_of(model))
        self._waiting += [type(module) for _, module in modules]
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
        """Note the code that an object brings along; `opened`: what it holds comes as well."""
        kind = type(value)
        if kind is str:
            self._names.add(value)
        elif kind is types.FunctionType or issubclass(kind, type):
            self._waiting.append(value)
        elif kind.__module__.partition(".")[0] not in _NOT_FOLLOWED:
            self._waiting.append(kind)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if base not in _BASE and (base.__module__ != "builtins"):
                for value in base.__dict__.values():
                    self._waiting += _functions(value)

    def _function(self, function: types.FunctionType) -> None:
        facts = facts_of(function.__code__)
        self._names |= facts.reads
        if facts.dynamic and not _is_library(function):
            self._any = True
        for cell in function.__closure__ or ():
            try:
                self._follow(cell.cell_contents, function)
            except ValueError:  # an empty cell
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
        """Note a function or class that the code of `user` refers to, or the class of an object.

        A library's helpers are looked at where they are in the file of the code that calls them: all that a library
        refers to is the whole library, and mentions every word.
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
    """The functions behind a member of a class."""
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
