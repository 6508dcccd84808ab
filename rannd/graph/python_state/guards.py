"""Guards on the Python state of the model's modules, which its code may have read during tracing.

A call with a different state needs a different graph. The state follows the same table as the cache key of a trace
(rannd.graph.fingerprint.state_rules), and is read in the same way:

- for every module: its class, training flag, hooks with their flags, the names and identities of its parameters,
  buffers and submodules, and dtype, shape, requires_grad and attributes of these tensors;
- all other attributes: numbers and strings by value (1, 1.0 and True differ, NaN equals NaN); containers, functions,
  methods and partials by their contents; objects by identity and contents, a few levels deep; modules that are not
  registered as submodules as a whole; arrays by their contents, tensors by identity;
- global settings of torch, global module hooks, active function and dispatch modes.

Not included are the entries listed as key only in the table (globals, attributes of classes, values of tensors), and
values beyond its limits. Runs no user code: no comparison, no property.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rannd.graph.fingerprint.object_reader import modules_of
from rannd.graph.fingerprint.state_rules import DERIVED, HOOK_FLAGS, INTERNAL
from rannd.graph.modules.contained_objects import Contents, has_memory
from rannd.graph.modules.source_location import Offence, SourceLocation
from rannd.graph.python_state.recorded_values import ABSENT, differing, forget_names, places, plain_values
from rannd.graph.python_state.snapshot import SnapshotWriter

_LIBRARIES = frozenset({"accelerate", "peft", "pyrannc", "rannd", "torch", "transformers"})
"""Packages whose hooks do nothing but what a graph does as well."""
HOOKS = tuple(name for hooks, flags in HOOK_FLAGS.items() for name in (hooks, *flags))
"""Attributes in which a module stores its hooks and their flags."""


@dataclass(eq=False)
class PythonState:
    """The Python state of a model's modules; compare states with == and `changed`."""

    modules: dict[str, dict[str, object]]
    """Module path -> attribute -> value, in a form that can be compared without running user code."""
    process: dict[str, object]
    """State of the process: settings of torch, global hooks, active modes."""
    held: list[object] = field(default_factory=list, repr=False)
    """Keeps objects that `modules` identifies by id alive, so that no other object gets their ids."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, PythonState) and self.process == other.process and self.modules == other.modules

    __hash__ = None  # type: ignore[assignment]

    def forget(self, names: Set[str]) -> None:
        """Drop the attributes with these names, from modules and from objects in their attributes."""
        for attributes in self.modules.values():
            forget_names(attributes, names)


def state_of(model: nn.Module, ignored: Set[str] = frozenset()) -> PythonState:
    """Read the Python state of all modules, without attributes with the names in `ignored`."""
    modules = list(modules_of(model))
    writer = SnapshotWriter(ignored, (module for _, module in modules))
    process = writer.process()
    with torch._C.DisableTorchFunction():
        return PythonState({name: writer.module(module) for name, module in modules}, process, writer.held)


def outside(state: PythonState, leaves: Sequence[str]) -> PythonState:
    """A state without modules that run as opaque operators: their code runs in every call and reads its present state.

    Their training flags are kept, since the shapes of their results may depend on them.
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
    """A module attribute that differs between two states."""

    module: str
    attribute: str
    inner: str = ""
    """Location of the difference inside the attribute, as a Python expression; empty if the attribute is replaced."""
    names: tuple[str, ...] = ()
    """Names of the attributes in `inner`."""
    values: tuple[object, ...] = field(default=(), compare=False)
    """The former and the present value if both are numbers or strings."""

    def unread(self, read: Container[str]) -> str | None:
        """A name that code must read to notice the change and that is not in `read`; None if all of them are."""
        if self.attribute in INTERNAL:
            return None
        names = (self.attribute, *self.names)
        return next((name for name in names if name not in INTERNAL and name not in read), None)

    def __str__(self) -> str:
        path = f"{self.attribute}{self.inner}"
        return f"{path} of module {self.module}" if self.module else f"{path} of the model"


@dataclass(frozen=True)
class SwitchChange(Change):
    """A setting of the process that differs between two states."""

    def unread(self, read: Container[str]) -> str | None:
        """Always None, since torch itself reads its settings."""
        return None

    def __str__(self) -> str:
        return f"{self.attribute} of torch"


def changed(before: PythonState, after: PythonState) -> list[Change]:
    """List the differences between two states."""
    found: list[Change] = [SwitchChange("", name) for name in differing(before.process, after.process)]
    for module in dict.fromkeys([*before.modules, *after.modules]):
        one, other = before.modules.get(module, {}), after.modules.get(module, {})
        for key in differing(one, other):
            where = places(one.get(key), other.get(key))
            own = key not in INTERNAL and key != "__class__"
            values = plain_values(one.get(key), other.get(key)) if own else ()
            found += [Change(module, key, inner, names, values) for inner, names in where]
    return found


def same_constants(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], held: Sequence[object]) -> bool:
    """Whether the constants of two equal graphs share memory if they are user tensors, which may be written later.

    `held`: objects in the modules' attributes, from their state. Constants created by the code during tracing may be
    different tensors.
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
    """The dicts in which a module stores its hooks and their flags."""
    return [module.__dict__[name] for name in HOOKS if name in module.__dict__]


def users_hooks(model: nn.Module, opaque: Collection[str]) -> list[str]:
    """Which forward hooks of the script's the modules have, outside of the submodules that run as opaque operators."""
    return [
        f"{getattr(hook, '__qualname__', type(hook).__qualname__)} of module {path or 'the model'}"
        for path, module in modules_of(model)
        if not any(path == each or each == "" or path.startswith(f"{each}.") for each in opaque)
        for held in (module._forward_pre_hooks, module._forward_hooks)
        for hook in held.values()
        if str(getattr(hook, "__module__", "")).partition(".")[0] not in _LIBRARIES
    ]


# -- during tracing --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept(model: nn.Module, changes: set[str]) -> Iterator[None]:
    """Run the model's code for tracing, and undo its changes to the modules' attributes and their contents.

    Adds the changed attributes to `changes`, since a graph does not repeat these changes, but not those that every call
    derives anew (state_rules.DERIVED). Offence if the code keeps a tensor from call to call, in an attribute or by
    replacing a buffer.
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
        for held, content in hooks:  # with their flags
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
            "which a graph cannot do (register a buffer, and write into it in place)",
        )
    of_modules = (each for each in seen if not isinstance(each, SwitchChange) and not _derived(model, each))
    changes.update(str(each) for each in of_modules if each.attribute not in INTERNAL or each.attribute == "training")


def _derived(model: nn.Module, change: Change) -> bool:
    """Whether forward derives a changed attribute anew in each call."""
    owner: object = model.get_submodule(change.module)
    *outer, name = (change.attribute, *change.names)
    for each in outer:
        owner = getattr(owner, "__dict__", {}).get(each)
    return any(name in DERIVED.get((kind.__module__, kind.__qualname__), ()) for kind in type(owner).__mro__)
