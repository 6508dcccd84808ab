"""What a graph cannot see: the Python state of the model's modules, which its code may have read while it was traced.

A call with another state than a graph was traced with is another graph. What counts is what counts for the key of a
trace, by the same table (rannd.graph.fingerprint.state_rules) and the same reader of objects:

- of every module its class, its training flag, its hooks with their flags, the names and identities of its parameters,
  buffers and submodules; of these tensors also type, shape, requires_grad and attributes;
- all other attributes: plain values by value (1, 1.0 and True differ, NaN is NaN), containers, functions, methods and
  partials by what they hold, objects by their identity and what they hold, a few levels deep; modules that no module
  has as a submodule as a whole; arrays by what is in them, tensors by their identity;
- switches of torch, hooks of all modules, modes around the call.

What the table lists as one-sided (globals, attributes of classes, the values of tensors) is not seen, nor what is
beyond its limits. No code of the user's is run: no comparison, no property.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rannd.graph.fingerprint.object_reader import modules_of
from rannd.graph.fingerprint.state_rules import HOOK_FLAGS, INTERNAL
from rannd.graph.modules.contained_objects import Contents, has_memory
from rannd.graph.modules.snapshot import ABSENT, SnapshotWriter, differing, forget_names, places
from rannd.graph.modules.source_location import Offence, SourceLocation

HOOKS = tuple(name for hooks, flags in HOOK_FLAGS.items() for name in (hooks, *flags))
"""Where a module keeps its hooks."""


@dataclass(eq=False)
class PythonState:
    """The Python state of a model's modules; states are compared with == and `changed`."""

    modules: dict[str, dict[str, object]]
    """Module path -> attribute -> its value, in a form that compares without running code of the user's."""
    process: dict[str, object]
    """What counts beside the modules."""
    held: list[object] = field(default_factory=list, repr=False)
    """What `modules` knows by id, so that no other object gets it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PythonState) and self.process == other.process and self.modules == other.modules

    __hash__ = None  # type: ignore[assignment]

    def forget(self, names: Set[str]) -> None:
        """Drop the attributes of these names, of modules and of objects that they have."""
        for attributes in self.modules.values():
            forget_names(attributes, names)


def state_of(model: nn.Module, ignored: Set[str] = frozenset()) -> PythonState:
    """The Python state of all modules, but for attributes of the names in `ignored`. Runs in every call."""
    modules = list(modules_of(model))
    writer = SnapshotWriter(ignored, (module for _, module in modules))
    process = writer.process()
    with torch._C.DisableTorchFunction():
        return PythonState({name: writer.module(module) for name, module in modules}, process, writer.held)


def outside(state: PythonState, leaves: Sequence[str]) -> PythonState:
    """A state without the modules that run as opaque operators: their code is run in every call, and sees its state.

    Their training flags stay: the shapes of what they make may depend on those.
    """
    if not leaves:
        return state

    def within(name: str) -> bool:
        return any(path == "" or name == path or name.startswith(f"{path}.") for path in leaves)

    return PythonState(
        {
            name: {"training": attributes.get("training", ABSENT)} if within(name) else attributes
            for name, attributes in state.modules.items()
        },
        state.process,
        state.held,
    )


@dataclass(frozen=True)
class Change:
    """An attribute in which two states differ."""

    module: str
    attribute: str
    inner: str = ""
    """Where in the attribute, as Python writes it, for what is in an object that is the same."""
    names: tuple[str, ...] = ()
    """Of the attributes on the way there."""

    def unread(self, read: Container[str]) -> str | None:
        """A name that code would have to read to see what differs, and that is not among `read`."""
        if self.attribute in INTERNAL:
            return None
        names = (self.attribute, *self.names)
        return next((name for name in names if name not in INTERNAL and name not in read), None)

    def __str__(self) -> str:
        path = f"{self.attribute}{self.inner}"
        return f"{path} of module {self.module}" if self.module else f"{path} of the model"


@dataclass(frozen=True)
class SwitchChange(Change):
    """Something of the process in which two states differ."""

    def unread(self, read: Container[str]) -> str | None:
        """torch reads it."""
        return None

    def __str__(self) -> str:
        return f"{self.attribute} of torch"


def changed(before: PythonState, after: PythonState) -> list[Change]:
    """The attributes in which two states differ."""
    found: list[Change] = [SwitchChange("", name) for name in differing(before.process, after.process)]
    for module in dict.fromkeys([*before.modules, *after.modules]):
        one, other = before.modules.get(module, {}), after.modules.get(module, {})
        for key in differing(one, other):
            where = places(one.get(key), other.get(key))
            found += [Change(module, key, inner, names) for inner, names in where]
    return found


def same_constants(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], held: Sequence[object]) -> bool:
    """Whether two graphs of equal content read the same tensors of the user's, which may be written in place later.

    `held`: what the modules have, from their state. Constants that the code makes when it is traced need not be the
    same.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in held if has_memory(tensor)}
    return all(
        name in other
        and (
            not has_memory(tensor)
            or tensor.untyped_storage().data_ptr() not in storages
            or (has_memory(other[name]) and tensor.data_ptr() == other[name].data_ptr())
        )
        for name, tensor in one.items()
    )


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    """The containers of a module's hooks."""
    return [module.__dict__[name] for name in HOOKS if name in module.__dict__]


# -- while the model is traced ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept(model: nn.Module, changes: set[str]) -> Iterator[None]:
    """Run the model's code for tracing, and undo what it did to the modules' attributes, and to what those hold.

    What it changed is named in `changes`, because its changes are no part of the graph; Offence where it keeps a
    tensor from call to call, in an attribute or by replacing a buffer.
    """
    modules = list(modules_of(model))
    before = {name: dict(module.__dict__) for name, module in modules}
    contents = Contents(modules)
    hooks = [(held, dict(held)) for _, module in modules for held in hooks_of(module)]
    buffers = [(name, module._buffers, dict(module._buffers)) for name, module in modules]
    state = state_of(model)
    seen: list[Change] = []
    try:
        yield
        seen = changed(state, state_of(model))
    finally:
        for held, content in hooks:  # with the flags that say that they are there
            held.clear()
            held.update(content)
        tensors: list[Change] = []
        for name, held_buffers, tensors_before in buffers:
            replaced = [key for key, value in held_buffers.items() if tensors_before.get(key) is not value]
            tensors += [Change(name, key) for key in replaced]
            held_buffers.clear()
            held_buffers.update(tensors_before)
        for name, module in modules:
            own, attributes = module.__dict__, before[name]
            for key in [key for key, value in own.items() if key not in INTERNAL or key == "training"]:
                value, old = own[key], attributes.get(key, ABSENT)
                if value is old:
                    continue
                if issubclass(type(value), torch.Tensor) and old is not ABSENT:
                    tensors.append(Change(name, key))
                if old is ABSENT:
                    del own[key]
                else:
                    own[key] = old
            for key in [key for key in attributes if key not in own and key not in INTERNAL]:
                own[key] = attributes[key]
        contents.put_back()
    if tensors:
        where = SourceLocation((tensors[0].module, "") if tensors[0].module else ("",), "")
        raise Offence(
            f"keeps a tensor from call to call in {tensors[0].attribute}",
            where,
            "which a graph cannot (register a buffer, and write into it in place)",
        )
    of_modules = (each for each in seen if not isinstance(each, SwitchChange))
    changes.update(str(each) for each in of_modules if each.attribute not in INTERNAL or each.attribute == "training")
