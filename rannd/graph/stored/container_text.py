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
LONGEST_NAME: Final = 512
"""Characters of the name of a class."""
MOST_NAME_PARTS: Final = 16
"""Names with dots between them in the name of a class."""
_FACTORIES = frozenset({"dict", "float", "int", "list", "set", "str", "tuple"})
"""Builtins that a defaultdict may call for missing keys."""
_DEFAULTDICT = {"default_factory_module", "default_factory_name", "dict_context"}


class Containers:
    """What the text of a TreeSpec names."""

    def __init__(self) -> None:
        self.classes: set[str] = set()
        """Container classes."""
        self.keys: set[str] = set()
        """Texts that containers keep beside their children: keys and names of attributes."""


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
    for name in check_container(text).classes:
        register_named(name)
    return pytree.treespec_loads(text)


def check_container(text: Any) -> Containers:
    """Check a serialized TreeSpec, and return what it names. Raises Broken."""
    if type(text) is not str or len(text) > LONGEST:
        raise Broken("the text of a container is too long, or no text")
    found = Containers()
    match _json(text):
        case [int(), tree]:
            _check_tree(tree, 0, found)
        case _:
            raise Broken(f"a container: {text[:200]}")
    return found


def check_class_name(name: str) -> None:
    """Check the dotted name of a class, which is looked up part by part. Raises Broken."""
    if len(name) > LONGEST_NAME or name.count(".") >= MOST_NAME_PARTS:
        raise Broken(f"the name of a class: {name[:200]}")


def _check_tree(data: Any, depth: int, found: Containers) -> None:
    match data:
        case {"type": None, "context": None, "children_spec": [], **rest} if not rest:
            pass
        case {"type": str(name), "context": context, "children_spec": [*children], **rest} if not rest:
            if depth >= DEEPEST:
                raise Broken(f"more than {DEEPEST} containers inside of each other")
            check_class_name(name)
            found.classes.add(name)
            _check_context(context, found.keys)
            for child in children:
                _check_tree(child, depth + 1, found)
        case _:
            raise Broken(f"a container: {str(data)[:200]}")


def _check_context(context: Any, keys: set[str]) -> None:
    """Check what a class keeps beside its children: names and keys, as plain values or as JSON of them."""
    if type(context) is str:
        try:  # as torch does with a text, whatever it begins with
            context = json.loads(context)
        except RecursionError as exc:
            raise Broken(f"a container: {exc}") from exc
        except ValueError:
            pass
    if isinstance(context, dict) and context.keys() == _DEFAULTDICT:
        if context["default_factory_module"] != "builtins" or context["default_factory_name"] not in _FACTORIES:
            raise Broken(f"a defaultdict that calls {str(context)[:200]}")
        context = context["dict_context"]
    _check_plain(context, 0, keys)


def _check_plain(value: Any, depth: int, keys: set[str]) -> None:
    if isinstance(value, list) and depth < DEEPEST:
        for each in value:
            _check_plain(each, depth + 1, keys)
    elif type(value) is str:
        keys.add(value)
    elif value is not None and type(value) not in (bool, int, float):
        raise Broken(f"a container that keeps {str(value)[:200]}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise Broken(f"a container: {exc}") from exc
