"""Which parts of a model stand in the way of a graph: found by the place of a failure, or by halving the modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from rannd.graph.modules.methods import split_path

Works = Callable[[Sequence[str]], bool]
"""Whether the model can be exported with the modules at these paths as leaves."""


def twins(model: nn.Module, name: str, paths: Sequence[str]) -> list[str]:
    """A module, and those of the same class and settings: their code will fail, too."""
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
    """Modules below `root` that stand in the way, found by making leaves of all others."""
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
    """The smallest module at or below `root` without whose graph the rest is right; the first of them.

    `right` tells whether the graph with the modules at some paths as leaves computes what the model computes; with the
    leaves at `paths` alone it does not.
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
    """Whether a module can be called at all: lists of modules cannot."""
    return type(module).forward is not nn.Module.forward


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether autograd calls the user's code for a module."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _kinds(model: nn.Module, names: Iterable[str]) -> list[list[str]]:
    """Modules by class and settings."""
    kinds: dict[Any, list[str]] = {}
    for name in names:
        module = model.get_submodule(name)
        kinds.setdefault((type(module), _settings(module)), []).append(name)
    return list(kinds.values())


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """What distinguishes the code paths of two modules of a class: flags and names, not sizes."""
    flags = {key: value for key, value in module.__dict__.items() if type(value) in (bool, str, type(None))}
    return (tuple(sorted(flags.items())), tuple(type(child) for child in module.children()))


def _children(model: nn.Module, root: str) -> list[str]:
    """The callable modules directly below one; lists of modules are looked through."""
    found = []
    for name, child in model.get_submodule(root).named_children():
        path = f"{root}.{name}" if root else name
        if is_called(child):
            found.append(path)
        else:
            found += _children(model, path)
    return found


def within(name: str, paths: Iterable[str]) -> bool:
    """Whether a part is one of those at `paths`, or inside one."""
    return any(path == "" or name == path or name.startswith(f"{path}.") for path in paths)


def outermost(names: Iterable[str]) -> list[str]:
    """Paths without those that are inside others."""
    unique = list(dict.fromkeys(names))
    return [name for name in unique if not within(name, [other for other in unique if other != name])]


def ancestors(path: str) -> tuple[str, ...]:
    """The modules around a part, innermost first; the last is ''."""
    name, method = split_path(path)
    parts = name.split(".") if name else []
    around = [".".join(parts[:count]) for count in range(len(parts) - (not method), -1, -1)]
    return tuple(dict.fromkeys(around)) or ("",)
