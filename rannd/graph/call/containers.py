"""Pytree registration of containers in the model's arguments and results."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree

from rannd.errors import TraceError
from rannd.graph.call.unread import is_unread, passed_on

_HELD = (type(None), bool, int, float, complex, str, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool,
         torch.dtype, torch.device)  # fmt: skip
"""Leaf types supported in arguments and results."""


_PLAIN = (type(None), bool, int, float, complex, str)
_PLAIN_TYPES = frozenset(_PLAIN)


def register_containers(value: Any) -> None:
    """Register dataclasses and subclasses of collections found in a value with pytree.

    Users need not register them. Subclasses of tuple, list, dict and UserDict (as tokenizers return) are rebuilt
    without calling their `__init__`, with their attributes restored.
    """
    for leaf in pytree.tree_leaves(value, is_leaf=is_plain_list):
        kind = type(leaf)
        if _can_register(kind) and not isinstance(leaf, _HELD) and kind not in pytree.SUPPORTED_NODES:
            _register(kind)
            register_containers(leaf)


def is_plain_list(value: Any) -> bool:
    """Whether a value is a list or tuple of numbers and strings alone; there may be thousands of them in a batch."""
    return type(value) in (list, tuple) and len(value) > 1 and _PLAIN_TYPES.issuperset(map(type, value))


def _can_register(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or issubclass(kind, (tuple, list, dict, UserDict))


def _register(kind: type) -> None:
    if dataclasses.is_dataclass(kind):
        _register_dataclass(kind)
    elif issubclass(kind, (dict, UserDict)):
        _register_mapping(kind)
    else:
        _register_sequence(kind)


def _register_sequence(kind: type) -> None:
    """Register a subclass of tuple or list; its children are its items, then the values of its attributes."""
    base: Any = tuple if issubclass(kind, tuple) else list

    def flatten(instance: Any) -> tuple[list[Any], list[Any]]:
        names, values = _attributes(instance)
        return [*instance, *values], [names]

    def unflatten(values: Any, context: Any) -> Any:
        (names,) = context
        values = list(values)
        count = len(values) - len(names)
        instance = base.__new__(kind, values[:count])
        if base is list:
            list.extend(instance, values[:count])
        return _with_attributes(instance, names, values[count:])

    def keys(instance: Any) -> list[Any]:
        return [pytree.SequenceKey(place) for place in range(len(instance))]

    _register_collection(kind, flatten, unflatten, keys)


def _register_mapping(kind: type) -> None:
    """Register a subclass of dict or UserDict; its children are its values, then the values of its attributes."""
    base: Any = next(each for each in kind.__mro__ if each in (OrderedDict, defaultdict, dict, UserDict))

    def flatten(instance: Any) -> tuple[list[Any], list[Any]]:
        names, values = _attributes(instance)
        return [*instance.values(), *values], [list(instance), names]

    def unflatten(values: Any, context: Any) -> Any:
        keys, names = context
        values = list(values)
        instance = base.__new__(kind)
        if base is UserDict:
            instance.__dict__["data"] = {}
        for key, value in zip(keys, values[: len(keys)], strict=True):
            base.__setitem__(instance, key, value)
        return _with_attributes(instance, names, values[len(keys) :])

    def keys(instance: Any) -> list[Any]:
        return [pytree.MappingKey(key) for key in instance]

    _register_collection(kind, flatten, unflatten, keys)


def _register_collection(
    kind: type,
    flatten: Callable[[Any], tuple[list[Any], list[Any]]],
    unflatten: Callable[[Any, Any], Any],
    keys: Callable[[Any], list[Any]],
) -> None:
    def with_keys(instance: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
        values, context = flatten(instance)
        named = [*keys(instance), *(pytree.GetAttrKey(name) for name in context[-1])]
        return list(zip(named, values, strict=True)), context

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda context: context,
        flatten_with_keys_fn=with_keys,
    )


def _attributes(instance: Any) -> tuple[list[str], list[Any]]:
    """Names and values of a collection's instance attributes.

    A UserDict such as a tokenizer's BatchEncoding holds tokenizer objects that no model reads; they become None.
    """
    held = dict(getattr(instance, "__dict__", {}))
    if isinstance(instance, UserDict):
        del held["data"]
        held = {name: value if isinstance(value, _PLAIN) else None for name, value in held.items()}
    return list(held), list(held.values())


def _with_attributes(instance: Any, names: Any, values: Any) -> Any:
    for name, value in zip(names, values, strict=True):
        instance.__dict__[name] = value
    return instance


def _register_dataclass(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten(instance: Any) -> tuple[list[Any], None]:
        return [getattr(instance, name) for name in names], None

    def unflatten(values: Any, _: None) -> Any:
        instance: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(instance, name, value)
        return instance

    def with_keys(instance: Any) -> tuple[list[tuple[Any, Any]], None]:
        return [(pytree.GetAttrKey(name), getattr(instance, name)) for name in names], None

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )


def plain_output(result: Any, dropped: list[str]) -> Any:
    """Replace leaves of a model's result that ranks cannot return by None, and append their names to `dropped`.

    An argument that no code reads may be returned as it is.

    TraceError if no tensor is left.
    """
    register_containers(result)
    paths, spec = pytree.tree_flatten_with_path(result)
    leaves = []
    for path, leaf in paths:
        if is_unread(leaf):
            leaf = passed_on(leaf)
        elif not isinstance(leaf, _HELD):
            name = pytree.keystr(path) or "the result"
            dropped.append(f"{name} ({type(leaf).__module__}.{type(leaf).__qualname__})")
            leaf = None
        leaves.append(leaf)
    if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        held = f", only {', '.join(dropped)}" if dropped else ""
        raise TraceError(
            f"the model returns no tensor{held}; it has to return tensors, or containers of them (lists, dicts, "
            "dataclasses, or types that are registered with torch.utils._pytree.register_pytree_node)"
        )
    return pytree.tree_unflatten(leaves, spec)


def register_named(name: str) -> None:
    """Register the container class of this qualified name, which a module imported so far has; ValueError if none."""
    if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        _register(_imported(name))


def _imported(name: str) -> type:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        for part in parts[count:]:
            found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None  # imports nothing
        if isinstance(found, type) and _can_register(found):
            return found
    raise ValueError(f"the imported modules have no container {name}")
