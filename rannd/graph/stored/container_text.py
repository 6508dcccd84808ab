"""Containers (pytree's TreeSpec) as text, in the form of torch.utils._pytree.treespec_dumps.

That form may name classes, which are looked up among those that are imported, a default of a defaultdict, and members
of enums. For the latter torch imports whatever module the text names, so `check_container` allows neither enums nor
defaults other than the usual builtins.
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch.utils._pytree as pytree

from rannd.graph.call.containers import register_named
from rannd.graph.stored.encoding import Broken

LONGEST: Final = 2**20
"""Characters of a text."""
DEEPEST: Final = 48
"""Containers inside of each other."""
_FACTORIES = frozenset({"dict", "float", "int", "list", "set", "str", "tuple"})
"""Builtins that a defaultdict may call for missing keys."""
_DEFAULTDICT = {"default_factory_module", "default_factory_name", "dict_context"}


def to_text(spec: pytree.TreeSpec) -> str:
    """Serialize a TreeSpec; ValueError if it has containers that cannot be looked up by name."""
    try:
        text = pytree.treespec_dumps(spec)
        same = from_text(text) == spec
    except Exception as exc:
        raise ValueError(f"the structure {spec} cannot be serialized: {exc}") from exc
    if not same:
        raise ValueError(f"the structure {spec} changes when it is serialized")
    return text


def from_text(text: str) -> pytree.TreeSpec:
    """Deserialize a TreeSpec; container classes are looked up in the modules imported so far. Raises Broken."""
    for name in check_container(text):
        register_named(name)
    return pytree.treespec_loads(text)


def check_container(text: Any) -> set[str]:
    """Check a serialized TreeSpec, and return the names of its container classes. Raises Broken."""
    if type(text) is not str or len(text) > LONGEST:
        raise Broken("the text of a container is too long, or no text")
    names: set[str] = set()
    match _json(text):
        case [int(), tree]:
            _check_tree(tree, 0, names)
        case _:
            raise Broken(f"a container: {text[:200]}")
    return names


def _check_tree(data: Any, depth: int, names: set[str]) -> None:
    match data:
        case {"type": None, "context": None, "children_spec": [], **rest} if not rest:
            pass
        case {"type": str(name), "context": context, "children_spec": [*children], **rest} if not rest:
            if depth >= DEEPEST:
                raise Broken(f"more than {DEEPEST} containers inside of each other")
            names.add(name)
            _check_context(context)
            for child in children:
                _check_tree(child, depth + 1, names)
        case _:
            raise Broken(f"a container: {str(data)[:200]}")


def _check_context(context: Any) -> None:
    """Check what a class keeps beside its children: names and keys, as plain values or as JSON of them."""
    if type(context) is str:
        try:  # as torch does with a text, whatever it begins with
            told = json.loads(context)
        except RecursionError as exc:
            raise Broken(f"a container: {exc}") from exc
        except ValueError:
            told = None
        context = told if isinstance(told, (dict, list)) else context
    if isinstance(context, dict) and context.keys() == _DEFAULTDICT:
        if context["default_factory_module"] != "builtins" or context["default_factory_name"] not in _FACTORIES:
            raise Broken(f"a defaultdict that calls {str(context)[:200]}")
        context = context["dict_context"]
    _check_plain(context, 0)


def _check_plain(value: Any, depth: int) -> None:
    if isinstance(value, list) and depth < DEEPEST:
        for each in value:
            _check_plain(each, depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise Broken(f"a container that keeps {str(value)[:200]}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise Broken(f"a container: {exc}") from exc
