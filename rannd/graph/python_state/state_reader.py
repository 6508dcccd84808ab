"""Reads the Python state of a model again and again, quickly where nothing has changed since an earlier reading.

A snapshot of a module is made in Python, attribute by attribute, in every call. Nearly all attributes are the same
objects as in the call before, and nearly all of these cannot change: numbers, strings, registered tensors and modules.
So that a call costs little, a `_Watch` compares them by identity, all modules at once, and reads only the rest anew:
the contents of lists, configurations, hooks. A state that it knows is returned as the same object.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Set
from itertools import chain
from typing import Any

import torch
from torch import nn

from rannd.graph.fingerprint.object_reader import modules_of
from rannd.graph.fingerprint.state_rules import IGNORED_OF_TENSORS, MODULE_PARTS, TENSORS, ModulePart
from rannd.graph.python_state.guards import PythonState, state_of
from rannd.graph.python_state.snapshot import SnapshotWriter, is_constant, is_skipped

MOST_STATES = 4
"""States that are known: those of training and evaluation, each with two sets of frozen parameters."""
MOST_MISSES = 2 * MOST_STATES
"""So many readings in a row that find a new state, as where code counts its calls, and none is watched for a while."""
REST = 100
"""How many readings that lasts."""


class StateReader:
    """Reads the Python state of a model's modules."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._watches: deque[_Watch] = deque(maxlen=MOST_STATES)
        """The latest is first."""
        self._ignored: frozenset[str] = frozenset()
        self._restless: set[int] = set()
        """Modules, by id, with attributes that are replaced by equal ones: these are compared by value."""
        self._misses = 0
        self._rest = 0

    def read(self, ignored: Set[str]) -> PythonState:
        """As `state_of`; the same object as before if nothing has changed since then."""
        if ignored != self._ignored:  # states that are known have forgotten names, or lack them
            self._watches.clear()
            self._ignored = frozenset(ignored)
            self._misses = self._rest = 0
        if self._rest:
            self._rest -= 1
            return state_of(self._model, ignored)
        for watch in self._watches:
            if watch.holds():
                self._misses = 0
                if watch is not self._watches[0]:
                    self._watches.remove(watch)
                    self._watches.appendleft(watch)
                return watch.state
        state = state_of(self._model, ignored)
        if self._watches:
            self._restless |= self._watches[0].restless(state)
        self._misses += 1
        if self._misses < MOST_MISSES:
            self._watches.appendleft(_Watch(self._model, state, self._ignored, self._restless))
        else:  # what is watched is kept alive
            self._watches.clear()
            self._misses, self._rest = 0, REST
        return state


class _Watch:
    """Whether a state is still that of the modules. Has to be made right after the state was read."""

    def __init__(self, model: nn.Module, state: PythonState, ignored: frozenset[str], restless: Set[int]) -> None:
        self.state = state
        self._ignored = ignored
        named = list(modules_of(model))
        self._every = [module for _, module in named]
        self._modules: list[nn.Module] = []
        """Those of whose attributes most are compared by identity."""
        self._names: list[str] = []
        self._owned: list[dict[str, Any]] = []
        """Their `__dict__`."""
        self._dicts: list[dict[str, Any]] = []
        """These, and dicts of tensors and submodules in them."""
        self._empty: list[Any] = []
        """Containers in which nothing is."""
        tensors: list[torch.Tensor] = []
        self._again: list[tuple[nn.Module | None, Any, object]] = []
        """(module, None, its record) or (None, value of an attribute, its record), in the order of `state_of`, because
        the limits of a snapshot are for all values together."""
        met: set[int] = set()
        for name, module in named:
            own = object.__getattribute__(module, "__dict__")
            recorded = state.modules[name]
            if id(module) in restless or not ignored.isdisjoint(own) or not _is_plain(own, ignored):
                self._again.append((module, None, recorded))
                continue
            self._modules.append(module)
            self._names.append(name)
            self._owned.append(own)
            for key, value in own.items():
                part = MODULE_PARTS.get(key, ModulePart.VALUE)
                if is_skipped(key):
                    continue
                if part is ModulePart.VALUE:
                    if not is_constant(value) and id(value) not in met:
                        met.add(id(value))
                        self._again.append((None, value, recorded[key]))
                elif not value:
                    self._empty.append(value)
                else:  # of tensors or modules
                    self._dicts.append(value)
                    if part is ModulePart.TENSORS:
                        tensors += [tensor for tensor in value.values() if tensor is not None]
        self._dicts += [tensor.__dict__ for tensor in tensors if tensor.__dict__]
        self._kinds = list(map(type, self._modules))
        self._dicts = [*self._owned, *self._dicts]
        self._sizes = list(map(len, self._dicts))
        self._keys = list(chain.from_iterable(self._dicts))
        self._values = list(chain.from_iterable(map(dict.values, self._dicts)))
        self._tensors = tensors
        with torch._C.DisableTorchFunction():
            self._properties = _properties(tensors)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        writer = SnapshotWriter(self._ignored, self._every)
        if writer.process() != self.state.process:
            return False
        with torch._C.DisableTorchFunction():
            return (
                self._are_same_objects()
                and self._properties == _properties(self._tensors)
                # In the same order as for the state.
                and all(
                    (writer.attribute(value) if module is None else writer.module(module)) == recorded
                    for module, value, recorded in self._again
                )
            )

    def restless(self, state: PythonState) -> set[int]:
        """Modules, by id, that are recorded alike in `state` although their attributes are other objects."""
        found, begin = set[int](), 0
        for name, module, own, size in zip(self._names, self._modules, self._owned, self._sizes, strict=False):
            before = self._values[begin : begin + size]
            begin += size
            alike = state.modules.get(name) == self.state.modules[name]
            if alike and not (len(own) == size and all(map(operator.is_, own.values(), before))):
                found.add(id(module))
        return found

    def _are_same_objects(self) -> bool:
        read = object.__getattribute__
        return (
            all(map(operator.is_, map(type, self._modules), self._kinds))
            and all(map(operator.is_, [read(each, "__dict__") for each in self._modules], self._owned))
            and not any(self._empty)
            and list(map(len, self._dicts)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(map(dict.values, self._dicts)), self._values))
            and list(chain.from_iterable(self._dicts)) == self._keys
        )


def _is_plain(own: dict[str, Any], ignored: Set[str]) -> bool:
    """Whether a module has no hooks and the like, and ordinary tensors."""
    for key, part in MODULE_PARTS.items():
        if part is ModulePart.VALUE or is_skipped(key):
            continue
        value = own.get(key)
        if not value:
            continue
        if part not in (ModulePart.TENSORS, ModulePart.MODULES) or type(value) is not dict:
            return False
        if part is ModulePart.TENSORS and not all(_is_ordinary(each, ignored) for each in value.values()):
            return False
    return True


def _is_ordinary(tensor: torch.Tensor | None, ignored: Set[str]) -> bool:
    """Whether a tensor is of one of torch's own classes, with attributes that cannot change, if any."""
    if tensor is None:
        return True
    own = tensor.__dict__.items()
    return type(tensor) in TENSORS and all(
        is_constant(value) and key not in ignored and not key.startswith(IGNORED_OF_TENSORS) for key, value in own
    )


def _properties(tensors: Iterable[torch.Tensor]) -> list[tuple[object, ...]]:
    """What a snapshot records of tensors beside their identity, and the dict of their attributes, if there are any."""
    return [
        (type(each), each.requires_grad, each.dtype, each.shape, id(own) if (own := each.__dict__) else 0)
        for each in tensors
    ]
