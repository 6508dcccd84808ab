"""Whose code is it: files and modules, the distributions they belong to, versions and contents.

Code of the standard library and of installed distributions is known by its version. All other code (scripts, files
beside them, distributions installed in editable form, notebooks) is the user's, and known by its content.
"""

from __future__ import annotations

import email
import functools
import hashlib
import os
import re
import site
import stat
import sys
import sysconfig
import types
from collections.abc import Mapping
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from rannd import __version__
from rannd.graph.fingerprint.introspect import HEAP_TYPE, module_name, mro_of, namespace, vars_of

USER = ""
"""The owner of code that belongs to no installed distribution."""

PYTHON = "python"
"""The owner of the standard library and of what is built in."""

_OURS = os.path.realpath(Path(__file__).parents[2]) + os.sep
"""This package, however it is installed: the part of it that traces counts by its content."""
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


@functools.cache
def owner_of_file(path: str) -> str:
    """The distribution(s) that a source file belongs to, PYTHON, or USER.

    `path` is what a code object or a module says; texts that are no absolute path (``<stdin>``) are the user's.
    """
    if path.startswith("<frozen "):
        return PYTHON
    if not os.path.isabs(path):
        return USER
    real = os.path.realpath(path)
    if real.startswith(_OURS):
        return "rannd"
    for directory in _site_directories():
        if real.startswith(directory):
            top = real[len(directory) :].split(os.sep)[0]
            return _distributions_of(directory, top.split(".")[0])
    for directory in _standard_directories():
        if real.startswith(directory):
            return PYTHON
    return USER


def owner_of_module(module: types.ModuleType) -> str:
    """Like `owner_of_file`, for a module; those without a file belong to their package."""
    values = namespace(module)
    file = values.get("__file__")
    if type(file) is str and os.path.isabs(file):
        return owner_of_file(file)
    name = module_name(module)
    spec = values.get("__spec__")
    if type(spec) is ModuleSpec:  # the module `_io` calls itself `io`
        if spec.name in sys.builtin_module_names and sys.modules.get(spec.name) is module:
            return PYTHON
        if spec.origin == "frozen" and spec.name.split(".")[0] in sys.stdlib_module_names:
            return PYTHON
    package = sys.modules.get(name.split(".")[0])
    if package is None or package is module or sys.modules.get(name) not in (module, None):
        return USER
    return owner_of_module(package)


def owner_of_name(name: object) -> str:
    """Like `owner_of_module`, for the name of a loaded module; USER where none has it."""
    module = sys.modules.get(name) if type(name) is str else None
    return owner_of_module(module) if module is not None else USER


def owner_of_function(function: types.FunctionType) -> str:
    """The distribution of a function's code; generated code belongs to the module whose globals it has."""
    path = function.__code__.co_filename
    if not path.startswith("<") or path.startswith("<frozen "):
        return owner_of_file(path)
    values = function.__globals__
    name = str(values.get("__name__"))
    if name.startswith("namedtuple_") and values.get("_tuple_new") is tuple.__new__:
        return PYTHON
    module = sys.modules.get(name)
    if module is None or namespace(module) is not values:
        return USER
    return owner_of_module(module)


def owner_of_class(cls: type) -> str:
    """The distribution of a class; USER where a class that was made elsewhere has methods of the user's."""
    name = cls.__module__
    module = sys.modules.get(name) if type(name) is str else None
    if module is None:
        return USER if cls.__flags__ & HEAP_TYPE else PYTHON
    owner = owner_of_module(module)
    if not owner or not cls.__flags__ & HEAP_TYPE or _looked_up(module, cls.__qualname__) is cls:
        return owner
    methods = (item for item in vars_of(cls).values() if type(item) is types.FunctionType)
    return owner if all(map(owner_of_function, methods)) else USER


def _looked_up(module: types.ModuleType, path: str) -> object:
    """What a module has at a dotted path of classes; None where there is nothing."""
    found: Any = None
    inside: Mapping[str, Any] = namespace(module)
    for part in path.split("."):
        found = inside.get(part)
        if type not in mro_of(type(found)):
            return None
        inside = vars_of(found)
    return found


def version_of(distribution: str) -> str:
    """The installed version, '?' where the distribution has none. Of rannd that of its code: metadata may be stale."""
    return __version__ if distribution == "rannd" else installed(distribution)[0]


@functools.cache
def installed(distribution: str) -> tuple[str, tuple[str, ...]]:
    """(version, requirements) of an installed distribution."""
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return "?", ()
    text = found.read_text("METADATA")
    if text is None:  # an old format
        return found.version or "?", tuple(found.requires or ())
    # Without the description behind the first empty line, which is long.
    head = email.message_from_string(text.partition("\n\n")[0])
    return head["Version"] or "?", tuple(head.get_all("Requires-Dist", ()))


@functools.cache
def requirements_of(distribution: str) -> frozenset[str]:
    """The installed distributions that one needs, directly and indirectly, and itself."""
    found: set[str] = set()
    waiting = [_normal(distribution)]
    while waiting:
        name = waiting.pop()
        if name in found or version_of(name) == "?":
            continue
        found.add(name)
        waiting += _direct_requirements(name)
    return frozenset(found)


@functools.cache
def _direct_requirements(distribution: str) -> tuple[str, ...]:
    """Extras are left out: they hold hundreds of tools for development."""
    matches = [_REQUIREMENT.match(line) for line in installed(distribution)[1] if "extra" not in line.partition(";")[2]]
    return tuple(sorted({_normal(match.group(1)) for match in matches if match}))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def _site_directories() -> tuple[str, ...]:
    found = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found += site.getsitepackages()
    found.append(site.getusersitepackages())
    return tuple(sorted({os.path.realpath(path) + os.sep for path in found}, key=len, reverse=True))


@functools.cache
def _standard_directories() -> tuple[str, ...]:
    found = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return tuple({os.path.realpath(path) + os.sep for path in found})


@functools.cache
def _distributions_of(directory: str, top: str) -> str:
    """Distributions in a site directory that install the package or module `top`; USER where none does."""
    try:
        same = metadata.distribution(top)
    except (metadata.PackageNotFoundError, ValueError):
        same = None
    if same is not None and Path(directory) == Path(str(same.locate_file(""))).resolve():
        declared = (same.read_text("top_level.txt") or top).split()
        if top in declared:
            return _normal(same.metadata["Name"])
    return "+".join(sorted({_normal(name) for name in _packages().get(top, [])})) or USER


@functools.cache
def _packages() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())


_contents: dict[str, tuple[tuple[int, int], str]] = {}
"""(time of change in nanoseconds, size) and SHA-256 of files that were read."""


def file_digest(path: str) -> str:
    """SHA-256 of a source file, 'no file' where there is none. Read once for each time of change and size."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return "no file"
        mark = (status.st_mtime_ns, status.st_size)
        known = _contents.get(path)
        if known is None or known[0] != mark:
            known = _contents[path] = (mark, hashlib.sha256(Path(path).read_bytes()).hexdigest())
    except OSError:
        return "no file"
    return known[1]
