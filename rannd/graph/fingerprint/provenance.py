"""Find the distribution that a file, module, function or class belongs to, its version and its requirements.

Code of the standard library and of installed distributions is identified by its version. All other code (scripts, files
beside them, editable installs, notebooks) is user code and identified by its content.
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
"""Owner of code that belongs to no installed distribution."""

PYTHON = "python"
"""Owner of the standard library and of builtins."""

_OURS = os.path.realpath(Path(__file__).parents[2]) + os.sep
"""Folder of this package, however it is installed. Its tracing code is identified by content: `sources_digest`."""
_TOP = re.compile(r"""^"?([^/,".\s]+)(?:/|(?:\.[\w-]+)*\.(?:py|so|pyd)[",])""", re.MULTILINE)
"""The top-level package or module of a line of RECORD."""
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


@functools.cache
def owner_of_file(path: str) -> str:
    """The distribution(s) that a source file belongs to, PYTHON, or USER.

    `path` comes from a code object or a module; anything but an absolute path (``<stdin>``) is user code.
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
    """Like `owner_of_file`, for a module; modules without a file belong to the owner of their package."""
    values = namespace(module)
    file = values.get("__file__")
    if type(file) is str and os.path.isabs(file):
        return owner_of_file(file)
    name = module_name(module)
    spec = values.get("__spec__")
    if type(spec) is ModuleSpec:  # the __name__ of module `_io` is `io`
        if spec.name in sys.builtin_module_names and sys.modules.get(spec.name) is module:
            return PYTHON
        if spec.origin == "frozen" and spec.name.split(".")[0] in sys.stdlib_module_names:
            return PYTHON
    package = sys.modules.get(name.split(".")[0])
    if package is None or package is module or sys.modules.get(name) not in (module, None):
        return USER
    return owner_of_module(package)


def owner_of_name(name: object) -> str:
    """Like `owner_of_module`, for the name of an imported module; USER if there is none of this name."""
    module = sys.modules.get(name) if type(name) is str else None
    return owner_of_module(module) if module is not None else USER


def owner_of_function(function: types.FunctionType) -> str:
    """The distribution of a function's code; generated code belongs to the module whose globals it uses."""
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
    """The distribution of a class; USER if the class is not found in its module and has methods from user code."""
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
    """Look up a class by its dotted path in a module; None if there is none."""
    found: Any = None
    inside: Mapping[str, Any] = namespace(module)
    for part in path.split("."):
        found = inside.get(part)
        if type not in mro_of(type(found)):
            return None
        inside = vars_of(found)
    return found


def version_of(distribution: str) -> str:
    """The installed version, '?' if unknown. For rannd the version in its code, since metadata may be stale."""
    return __version__ if distribution == "rannd" else installed(distribution)[0]


@functools.cache
def installed(distribution: str) -> tuple[str, tuple[str, ...]]:
    """(version, requirements) of an installed distribution."""
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return "?", ()
    text = found.read_text("METADATA")
    if text is None:  # installed in the old egg format
        return found.version or "?", tuple(found.requires or ())
    # Parse only the header: the description after the first empty line is long.
    head = email.message_from_string(text.partition("\n\n")[0])
    return head["Version"] or "?", tuple(head.get_all("Requires-Dist", ()))


@functools.cache
def requirements_of(distribution: str) -> frozenset[str]:
    """The installed distributions that a distribution requires, directly and indirectly, including itself."""
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
    """Requirements without those of extras, which are often hundreds of development tools."""
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
    """Distributions in a site directory that provide the package or module `top`; USER if none does."""
    try:
        same = metadata.distribution(top)
    except (metadata.PackageNotFoundError, ValueError):
        same = None
    if same is not None and Path(directory) == Path(str(same.locate_file(""))).resolve():
        declared = (same.read_text("top_level.txt") or top).split()
        if top in declared:
            return _normal(same.metadata["Name"])
    return "+".join(sorted({_normal(each.metadata["Name"]) for each in providers().get(top, [])})) or USER


@functools.cache
def providers() -> dict[str, list[metadata.Distribution]]:
    """Distributions of each top-level package or module, as ``packages_distributions`` finds them.

    That parses the metadata of each distribution and makes a path of each file, which delays the start of a job.
    """
    found: dict[str, list[metadata.Distribution]] = {}
    for each in metadata.distributions():
        tops = (each.read_text("top_level.txt") or "").split()
        if not tops:
            listed = each.read_text("RECORD")
            if listed is None:  # an older format
                listed = "\n".join(f"{file}," for file in each.files or ())
            tops = list(dict.fromkeys(_TOP.findall(listed)))
        for top in tops:
            found.setdefault(top, []).append(each)
    return found


_contents: dict[str, tuple[tuple[int, int], str]] = {}
"""Maps paths to ((modification time in nanoseconds, size), SHA-256)."""


def file_digest(path: str) -> str:
    """SHA-256 of a source file, 'no file' if there is none. Cached until its modification time or size changes."""
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
