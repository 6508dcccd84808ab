"""What a graph cannot see: the Python state of the model's modules, which its code may have read while it was traced.

The state of a module is its training flag, its attributes that are plain values, and which buffers, parameters and
hooks it has. A call with another state than a graph was traced with is another graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import nn

from rannd.errors import TraceError

State = dict[tuple[str, str], object]

_PLAIN = (int, float, bool, str, type(None), torch.dtype)
_KINDS = frozenset(_PLAIN)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_LONGEST = 16
"""Longer lists and tuples are data, not settings."""


def state_of(model: nn.Module, ignored: Set[tuple[str, str]] = frozenset()) -> State:
    """The Python state of all modules, but for the (module, attribute) pairs in `ignored`."""
    state: State = {}
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            kind = type(value)
            if kind in _KINDS:
                state[name, key] = value
            elif key == "_parameters":
                state[name, key] = tuple((id(p), p is not None and p.requires_grad) for p in value.values())
            elif key == "_buffers" or (key in _HOOKS and value):
                state[name, key] = tuple(map(id, value.values()))
            elif kind in (list, tuple) and len(value) <= _LONGEST and all(type(item) in _KINDS for item in value):
                state[name, key] = (kind, *value)
    for pair in ignored:
        state.pop(pair, None)
    return state


def changed(before: State, after: State) -> list[tuple[str, str]]:
    """The (module, attribute) pairs in which two states differ."""
    return [pair for pair in before.keys() | after.keys() if before.get(pair, state_of) != after.get(pair, state_of)]


@contextlib.contextmanager
def kept(model: nn.Module, changes: set[str]) -> Iterator[None]:
    """Run the model's code for tracing, and undo what it did to the modules' attributes.

    Plain attributes that it changed are named in `changes`, because their changes are no part of the graph;
    TraceError where it keeps a tensor from call to call.
    """
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    lists = {
        (name, key): list(value)
        for name, attributes in before.items()
        for key, value in attributes.items()
        if type(value) is list and len(value) <= _LONGEST
    }
    yield
    for name, module in model.named_modules():
        if name not in before:
            continue
        for key, value in list(module.__dict__.items()):
            old = before[name].get(key, kept)
            where = f"{key} of module {name}" if name else f"{key} of the model"
            if isinstance(value, torch.Tensor) and value is not old:
                _put_back(module, key, old)
                if old is not kept:
                    raise TraceError(
                        f"forward keeps a tensor from call to call in attribute {where}; no graph can show that. "
                        "Register it as a buffer, and write into it in place"
                    )
                changes.add(where)
            elif (name, key) in lists and value is old and _differ(value, lists[name, key]):
                value[:] = lists[name, key]
                changes.add(where)
            elif type(value) in _KINDS and value is not old and value != old:
                _put_back(module, key, old)
                changes.add(where)


def _differ(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists differ, without comparing what they hold (tensors do not compare)."""
    return len(one) != len(other) or any(a is not b for a, b in zip(one, other, strict=True))


def _put_back(module: nn.Module, key: str, old: Any) -> None:
    if old is kept:
        del module.__dict__[key]
    else:
        module.__dict__[key] = old
