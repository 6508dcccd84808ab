"""Find the submodules that prevent an export or make it wrong, by bisecting the module tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from rannd.graph.modules.methods import split_path

Works = Callable[[Sequence[str]], bool]
"""Whether the model can be exported with the modules at these paths as leaves."""


def twins(model: nn.Module, name: str, paths: Sequence[str]) -> list[str]:
    """Paths of a module and of those with the same class and settings, whose code will fail as well."""
    if not name:
        return [""]
    module = model.get_submodule(name)
    like = _settings(module)
    return [
        other
        for other, each in model.named_modules()
        if other == name
        or (
            type(each) is type(module)
            and _settings(each) == like
            and other
            and not within(other, [*paths, name])
            and not within(name, [other])
        )
    ]


def halve(model: nn.Module, root: str, paths: list[str], works: Works) -> list[str]:
    """Find the modules below `root` that prevent an export, by making all others leaves."""
    children = [name for name in _children(model, root) if not within(name, paths)]
    if not children or not works(outermost([*paths, *children])):
        return [root]
    found: list[str] = []
    for names in _kinds(model, children):
        others = [name for name in children if name not in names]
        if not works(outermost([*paths, *others])):
            for name in names:
                found += halve(model, name, [*paths, *(other for other in children if other != name)], works)
    return found or [root]


def first_wrong(model: nn.Module, paths: Sequence[str], right: Works, root: str = "") -> str:
    """Find the smallest module at or below `root` such that the graph is right if it becomes a leaf; the first one.

    `right` tells whether the graph with the modules at the given paths as leaves computes what the model computes; with
    only those at `paths` as leaves it does not.
    """
    children = [name for name in _children(model, root) if not within(name, paths)]
    if not children or not right(outermost([*paths, *children])):
        return root
    for names in _kinds(model, children):
        others = outermost([*paths, *(name for name in children if name not in names)])
        if right(others):
            continue
        for name in names:
            rest = outermost([*paths, *(other for other in children if other != name)])
            if len(names) == 1 or not right(rest):
                return first_wrong(model, rest, right, name)
    return root


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; ModuleList and ModuleDict have none."""
    return type(module).forward is not nn.Module.forward


@contextlib.contextmanager
def packed_calls(model: nn.Module) -> Iterator[list[str]]:
    """Collect the paths of recurrent layers that are called with a PackedSequence."""
    found: list[str] = []

    def watch(name: str, module: nn.Module) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], PackedSequence):
                found.append(name)

        return module.register_forward_pre_hook(hook)

    handles = [watch(name, module) for name, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has full backward hooks or backward pre-hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _kinds(model: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """Group modules by class and settings."""
    kinds: dict[Any, list[str]] = {}
    for name in names:
        module = model.get_submodule(name)
        kinds.setdefault((type(module), _settings(module)), []).append(name)
    return list(kinds.values())


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Attributes that may select other code paths in modules of one class: flags and strings, not sizes."""
    flags = {key: value for key, value in module.__dict__.items() if type(value) in (bool, str, type(None))}
    return (tuple(sorted(flags.items())), tuple(type(child) for child in module.children()))


def _children(model: nn.Module, root: str) -> list[str]:
    """The nearest callable modules below `root`: containers without a forward are replaced by their children."""
    found = []
    for name, child in model.get_submodule(root).named_children():
        path = f"{root}.{name}" if root else name
        if is_called(child):
            found.append(path)
        else:
            found += _children(model, path)
    return found


def within(name: str, paths: Iterable[str]) -> bool:
    """Whether a path is one of `paths`, or inside one."""
    return any(path == "" or name == path or name.startswith(f"{path}.") for path in paths)


def outermost(names: Iterable[str]) -> list[str]:
    """Drop paths that are inside others."""
    unique = list(dict.fromkeys(names))
    return [name for name in unique if not within(name, [other for other in unique if other != name])]


def ancestors(path: str) -> tuple[str, ...]:
    """The modules that contain a part, innermost first; the last is ''."""
    name, method = split_path(path)
    parts = name.split(".") if name else []
    around = [".".join(parts[:count]) for count in range(len(parts) - (not method), -1, -1)]
    return tuple(dict.fromkeys(around)) or ("",)
