"""Serialize the functions and classes that a model refers to, and the globals that their code reads.

- Where a function or class occurs, a label is written; its description is written once, to the stream `code`.
- User code is followed: every global that it reads is written to the stream `globals`. Library code is identified by
  its bytecode and the version of its distribution, and is not followed.
- A method of a user class is followed once its name occurs in followed code, or followed code may access any name.
  Other methods, such as one that saves the model, are identified by their bytecode only.
"""

from __future__ import annotations

import builtins
import collections
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import nn

from rannd.graph.fingerprint import allowlists
from rannd.graph.fingerprint.bytecode import Import, digest_of, facts_of, names_in
from rannd.graph.fingerprint.introspect import HEAP_TYPE, cells, full_name, module_name, mro_of, namespace, vars_of
from rannd.graph.fingerprint.module_writer import ModuleWriter
from rannd.graph.fingerprint.object_reader import C_DESCRIPTORS, CACHED
from rannd.graph.fingerprint.patched_libraries import Foreign
from rannd.graph.fingerprint.provenance import PYTHON, USER, owner_of_function, owner_of_module
from rannd.graph.fingerprint.state_rules import IGNORED, IGNORED_OF_FUNCTIONS
from rannd.graph.fingerprint.value_writer import Hidden

_METHODS = frozenset({types.FunctionType, staticmethod, classmethod, property, functools.cached_property, CACHED})
_CLASS_SKIPPED = frozenset(
    {"__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
     "__annotate_func__", "__annotations_cache__", "__abstractmethods__", "_abc_impl", "__firstlineno__",
     "__static_attributes__", "__parameters__", "__orig_bases__"}
)  # fmt: skip
_ABSENT = object()
_UNKEYED = "which depends on state that a cache key cannot include (files, devices, random numbers, other processes)"


class Inspector(ModuleWriter):
    """Serializes values to text, together with the code that they refer to."""

    def __init__(self, tensors: Mapping[int, str], modules: Mapping[int, str]) -> None:
        super().__init__(tensors, modules)
        self.code: list[str] = []
        """Descriptions of functions and classes."""
        self.globals: list[str] = []
        """Globals that followed code reads: one line per name."""
        self.files: set[str] = set()
        """Source files of followed code."""
        self.owners: set[str] = set()
        """Distributions whose code was found."""
        self.libraries: set[str] = set()
        """Names of the library modules whose classes were found."""
        self._named: dict[int, str] = {}
        """Labels of functions and classes."""
        self._queue: collections.deque[tuple[Callable[[], None], str]] = collections.deque()
        self._read: set[tuple[int, str]] = set()
        self._names: set[str] = set()
        self._any_name = False
        self._constructed: set[str] = set()
        self._waiting: dict[str, list[tuple[str, Any]]] = {}
        self._escaped: set[str] = set()

    def finish(self) -> None:
        """Serialize all functions and classes found so far, and everything they refer to."""
        while self._queue:
            while self._queue:
                read, where = self._queue.popleft()
                self._scope = self._where = where
                self._tolerant = False
                read()
            self._containers()
        for name in sorted(self._escaped):
            for attribute in sorted(allowlists.OUTSIDE_ATTRIBUTES.get(name, frozenset()) & self._names):
                raise Hidden(f"the model's code may read {name}.{attribute}, {_UNKEYED}")

    def _containers(self) -> None:
        """Serialize the pytree functions of the user's container classes that were found."""
        for cls, node in list(pytree.SUPPORTED_NODES.items()):
            label = self._named.get(id(cls))
            if label is None or (id(cls), "container") in self._read or self._class_owner(cls):
                continue
            self._read.add((id(cls), "container"))
            for function in (node.flatten_fn, node.unflatten_fn):
                if type(function) is not types.FunctionType or owner_of_function(function) != "rannd":
                    where = f"container {label}"
                    self.code.append(f"{where}={self.write(function, where, where)}")

    def _label(self, value: Any) -> str:
        name = full_name(value)
        self._labels[f"label {name}"] += 1
        label = self._named[id(value)] = f"{name}@{self._labels[f'label {name}']}"
        self._kept.append(value)
        return label

    def _function(self, value: types.FunctionType) -> str:
        owner = owner_of_function(value)
        if owner and not self._tolerant:
            # functools.wraps copies `__module__` and names of the wrapped function, so take those of the code
            home = str(value.__globals__.get("__name__"))
            home = "collections" if home.startswith("namedtuple_") else home
            self._allowed(owner, home, value.__code__.co_qualname)
        label = self._named.get(id(value)) or self._label(value)
        tolerant = self._tolerant and owner != USER
        if (id(value), "") not in self._read and (id(value), "tolerant" if tolerant else "") not in self._read:
            self._read.add((id(value), "tolerant" if tolerant else ""))
            self._queue.append((lambda: self._read_function(value, label, owner, tolerant), _place(value, owner)))
        return f"function {label}"

    def _read_function(self, function: types.FunctionType, label: str, owner: str, tolerant: bool) -> None:
        digest = digest_of(function.__code__)
        attributes = {name: value for name, value in function.__dict__.items() if name not in IGNORED_OF_FUNCTIONS}
        if owner:
            self.owners.add(owner)
        if owner and not (function.__closure__ or function.__defaults__ or function.__kwdefaults__ or attributes):
            self.code.append(f"{label} {owner} {digest}")
            return
        self._tolerant = tolerant
        parts = [label, owner or "user", digest]
        parts.append(self._value(function.__defaults__))
        parts.append(self._value(function.__kwdefaults__))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name == "__class__" and type(cell) is types.CellType and _is_class(cell):
                parts.append(f"{name}={self._class(cell.cell_contents)}")
            else:
                parts.append(f"{name}={self._cell(cell)}")
        if attributes:
            parts.append(self._value(attributes))
        self.code.append(" ".join(parts))
        if not owner:
            self._add_file(function.__code__.co_filename, function.__globals__)
            self._follow(function)

    def _add_file(self, path: str, values: Mapping[str, Any]) -> None:
        if not path.startswith("<"):
            self.files.add(path)

    def _follow(self, function: types.FunctionType) -> None:
        """Serialize the globals that a user function reads."""
        facts = facts_of(function.__code__)
        values = function.__globals__
        if facts.writes:
            raise Hidden(f"{self._where} assigns the global {facts.writes[0]}")
        for name in sorted(allowlists.OUTSIDE_NAMES & facts.names):
            raise Hidden(f"{self._where} uses {name}")
        for statement in facts.imports:
            self._import(statement, values)
        for chain in facts.chains:
            self._global(chain, values)
        names = set(facts.names)
        if facts.dynamic:
            self._mention_all()
        if ("type",) in facts.chains or "__class__" in names:
            self._constructed.add("*")
            self._wake([name for name in self._waiting if name.startswith("construct ")])
        if not names.isdisjoint(("copy", "deepcopy")):
            names |= allowlists.COPYING
        self._mention(names)

    def _mention_all(self) -> None:
        """Treat every attribute name as read: code accesses attributes by names that are not constants."""
        self._any_name = True
        self._wake([name for name in self._waiting if not name.startswith("construct ")])

    def _mention(self, names: Iterable[str]) -> None:
        new = set(names) - self._names
        self._names |= new
        self._wake(sorted(new & self._waiting.keys()))

    def _wake(self, names: list[str]) -> None:
        """Follow the methods that were deferred until these names are mentioned."""
        for name in names:
            for place, method in self._waiting.pop(name, []):
                self.code.append(f"{place}={self.write(method, place, place)}")

    def _class(self, cls: type, constructed: bool = False) -> str:
        """Write the label of a class; `constructed`: code may create new instances of it."""
        label = self._named.get(id(cls))
        if constructed and cls in (operator.attrgetter, operator.methodcaller) and not self._tolerant:
            self._mention_all()
        owner = self._class_owner(cls)
        if owner and constructed and not self._tolerant:
            self._allowed(owner, cls.__module__, cls.__qualname__)
        if label is None:
            label = self._label(cls)
            if cls.__flags__ & HEAP_TYPE:
                self._queue.append((lambda: self._read_class(cls, label, owner), f"class {cls.__qualname__}"))
        if constructed and not owner and label not in self._constructed:
            for base in mro_of(cls):
                if not self._class_owner(base):
                    above = self._named.get(id(base)) or self._class(base).removeprefix("class ")
                    self._constructed.add(above)
                    self._wake([f"construct {above}"])
        return f"class {label}"

    def _read_class(self, cls: type, label: str, owner: str) -> None:
        self._tolerant = bool(owner)
        if owner:
            self.owners.add(owner)
            self.libraries.add(cls.__module__)
        parts = [label, owner or "user", *(self._class(base) for base in mro_of(cls)[1:])]
        if type(cls) is not type:
            parts.append(f"metaclass {self._class(type(cls))}")
        if not owner:
            for base in mro_of(cls)[1:]:
                if self._class_owner(base):
                    self._mention(_names_called_by(base))
        ignored = IGNORED.get((cls.__module__, cls.__qualname__), ())
        for name, item in list(vars_of(cls).items()):
            if name in _CLASS_SKIPPED or name in ignored or type(item) in C_DESCRIPTORS:
                continue
            if not _METHODS.isdisjoint(mro_of(type(item))):
                if owner:
                    parts.append(f"{name}={self._value(item)}")
                else:
                    parts.append(f"{name}={self._outline(item)}")
                    self._later(name, label, item)
            else:
                self._scope, self._where = f"{label}.{name}", f"attribute {name} of class {cls.__qualname__}"
                parts.append(f"{name}={self._value(item)}")
        self.code.append(" ".join(parts))

    def _later(self, name: str, label: str, method: Any) -> None:
        """Follow a method of a user class now if followed code may call it, otherwise once its name is mentioned."""
        if name in allowlists.CONSTRUCTING:
            ready = label in self._constructed or "*" in self._constructed
            key = f"construct {label}"
        else:
            special = name.startswith("__") and name.endswith("__") and name not in allowlists.COPYING
            ready = special or self._any_name or name in self._names or name == "forward"
            key = name
        place = f"{label}.{name}"
        if ready:
            self.code.append(f"{place}={self.write(method, place, place)}")
        else:
            self._waiting.setdefault(key, []).append((place, method))

    def _outline(self, value: Any, depth: int = 3) -> str:
        """Write digests of a method's bytecode and of the functions that it wraps; nothing is followed."""
        if isinstance(value, (staticmethod, classmethod)):
            return f"{type(value).__name__} {self._outline(value.__func__)}"
        if isinstance(value, property):
            return f"property {' '.join(self._outline(each) for each in (value.fget, value.fset, value.fdel))}"
        if isinstance(value, functools.cached_property):
            return f"cached_property {self._outline(value.func)}"
        if type(value) is CACHED:
            return f"cached {self._outline(value.__wrapped__)}"
        if type(value) is not types.FunctionType or not depth:
            return type(value).__name__
        inner = [self._outline(cell, depth - 1) for _, cell in cells(value)]
        return f"{digest_of(value.__code__)}[{' '.join(inner)}]"

    def _global(self, chain: tuple[str, ...], values: Mapping[str, Any]) -> None:
        """Serialize what a chain ``name.attribute.attribute`` reads: the first value in it that is not a module."""
        current = values.get(chain[0], _ABSENT)
        if current is _ABSENT:
            found = values.get("__builtins__", builtins)
            offered = namespace(found) if isinstance(found, types.ModuleType) else found
            current = offered.get(chain[0], _ABSENT)
            if current is not _ABSENT and current is vars(builtins).get(chain[0]):
                self._builtin(chain[0])
                return
        path = chain[0]
        for attribute in (*chain[1:], None):
            if current is _ABSENT or types.ModuleType not in mro_of(type(current)):
                break
            self._count += 1
            name, owner = module_name(current), owner_of_module(current)
            if owner:
                self._allowed(owner, name, "")
            if attribute is None:
                if not owner:
                    raise Hidden(f"{self._where} uses the module {name} as a value")
                self._escaped.add(name)
                break
            if attribute in allowlists.OUTSIDE_ATTRIBUTES.get(name, frozenset()):
                raise Hidden(f"{self._where} uses {name}.{attribute}, {_UNKEYED}")
            if name == "torch.ops" and attribute not in allowlists.OPERATORS:
                raise Hidden(f"{self._where}: the code of the custom operators torch.ops.{attribute} cannot be read")
            inside = namespace(current)
            if attribute not in inside and owner:
                return  # created on access by the library's module-level __getattr__, which its version identifies
            if attribute not in inside and "__getattr__" in inside:
                raise Hidden(f"{self._where} uses {name}.{attribute}, which the module's __getattr__ creates on access")
            current = inside.get(attribute, _ABSENT)
            path += f".{attribute}"
        self._line(values, path, current)

    def _line(self, values: Mapping[str, Any], path: str, value: Any) -> None:
        home = f"{values.get('__name__')}.{path}"
        if (id(values), path) in self._read:
            return
        self._read.add((id(values), path))
        self._kept.append(values)
        text = "missing" if value is _ABSENT else self.write(value, home, f"{self._where}, global {path}")
        self.globals.append(f"{home}={text}")

    def _import(self, statement: Import, values: Mapping[str, Any]) -> None:
        name = statement.module
        if statement.level:
            package = str(values.get("__package__") or "").split(".")
            name = ".".join([*package[: len(package) + 1 - statement.level], *([name] if name else [])])
        module = sys.modules.get(name)
        if module is None:
            raise Hidden(f"{self._where} imports {name}, which has not been imported yet")
        owner = owner_of_module(module)
        if not owner and not statement.names:
            raise Hidden(f"{self._where} imports the module {name} when it is called; import it at the top of its file")
        if owner:
            self._allowed(owner, name, "")
            self._escaped.add(name)
            self._escaped.add(name.split(".")[0])
        for attribute in statement.names:
            inside = namespace(module)
            if attribute in inside:
                self._global(("module", attribute), {"__name__": name, "module": module})
            elif not owner:
                raise Hidden(f"{self._where} imports {attribute} from {name}, which does not define it yet")

    def _library_module(self, module: types.ModuleType) -> str:
        name, owner = module_name(module), owner_of_module(module)
        if self._tolerant:
            return f"module {name}"
        if not owner:
            raise Hidden(f"{self._where}: the module {name} is used as a value")
        self._allowed(owner, name, "")
        self._escaped.add(name)
        return f"module {name}"

    def _builtin(self, name: str, as_value: bool = False) -> None:
        if as_value and name in allowlists.BY_ANY_NAME and not self._tolerant:
            self._mention_all()
        known = vars(builtins).get(name)
        harmless = name in allowlists.BUILTINS or (isinstance(known, type) and issubclass(known, BaseException))
        if not harmless and not self._tolerant:
            raise Hidden(f"{self._where} uses {name}")

    def _allowed(self, owner: str, module: str | None, name: str) -> None:
        """Raise Hidden if a name of a library module depends on state that a key cannot include."""
        module = module or "?"
        if owner == PYTHON:
            top = module.split(".")[0].lstrip("_") or module
            if top not in allowlists.HARMLESS and module not in allowlists.HARMLESS:
                raise Hidden(f"{self._where} uses module {top} of the standard library")
            return
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            if ".".join(parts[:length]) in allowlists.OUTSIDE_MODULES:
                raise Hidden(f"{self._where} uses {module}{'.' + name if name else ''}, {_UNKEYED}")
        if name in allowlists.OUTSIDE_ATTRIBUTES.get(module, frozenset()):
            raise Hidden(f"{self._where} uses {module}.{name}, {_UNKEYED}")

    def changed_libraries(self) -> None:
        """Serialize user functions and classes that were assigned into library modules and classes.

        Searches the namespaces of torch and Python, and all modules that the libraries of the model's classes import:
        functions registered by name (attention of Hugging Face models) are found there.
        """
        found = Foreign(self.libraries)
        self.code += found.functions
        self.owners |= found.owners - {USER}
        for place, value in found.values:
            self.code.append(f"{place} in a library={self.write(value, place, place)}")


def _place(function: types.FunctionType, owner: str) -> str:
    return f"{owner + ' ' if owner else ''}function {full_name(function)}"


def _is_class(cell: types.CellType) -> bool:
    try:
        return type in mro_of(type(cell.cell_contents))
    except ValueError:
        return False


@functools.cache
def _module_names() -> frozenset[str]:
    return frozenset(vars_of(nn.Module)) - allowlists.NOT_IN_FORWARD


def _names_called_by(base: type) -> frozenset[str]:
    """Names of methods that a library class may call on a user class derived from it."""
    if base is object:
        return frozenset()
    if base is nn.Module:
        return _module_names()
    names: set[str] = set(vars_of(base))
    for item in vars_of(base).values():
        for function in (item, getattr(item, "__func__", None), getattr(item, "fget", None)):
            if type(function) is types.FunctionType:
                names |= names_in(function.__code__)
    return frozenset(names - allowlists.CONSTRUCTING)
