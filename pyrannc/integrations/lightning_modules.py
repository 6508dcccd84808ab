"""Which modules of a LightningModule are partitioned: one of them, the whole, or each with which its steps compute."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from pyrannc.integrations.lightning_forward import has_parameters, no_layers
from rannd.errors import UsageError

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Hooks that compute."""


def modules_to_partition(lightning_module: LightningModule) -> list[str]:
    """Return the names of the modules that are partitioned, as ``named_modules()`` has them; "" is the whole.

    The only child with parameters is. Else it is the LightningModule itself with its ``forward``; but if its steps
    call children with parameters themselves, each of these is, so that gradients of all of them are averaged.

    Raises:
        UsageError: The LightningModule has parameters of its own, outside of its children, and no ``forward``.
    """
    parts = [*_parts(lightning_module)]
    bare = has_parameters(lightning_module, recurse=False)
    if len(parts) == 1 and not bare:
        return parts
    if _has_forward(lightning_module) and not _called_children(lightning_module):
        return [""]
    if bare and not _has_forward(lightning_module):
        raise UsageError(
            f'strategy="rannc" partitions modules, but {type(lightning_module).__name__} has parameters of its own and '
            "no forward; write one, and call self(..) in training_step, or put all layers into one module, and call "
            "that"
        )
    return parts


def names_of(lightning_module: LightningModule, module: nn.Module) -> list[str]:
    """Return all names by which a LightningModule has a module."""
    return [name for name, each in lightning_module.named_modules(remove_duplicate=False) if each is module]


def exchange(lightning_module: LightningModule, module: nn.Module, other: nn.Module) -> None:
    """Put another module in place of one, wherever the LightningModule has that."""
    for name in names_of(lightning_module, module):
        lightning_module.set_submodule(name, other)


def check_parts(lightning_module: LightningModule, names: list[str]) -> None:
    """UsageError for parameters that no partitioned module has, or several have."""
    kind, owners = type(lightning_module).__name__, dict[int, str]()
    for name in names:
        for parameter in lightning_module.get_submodule(name).parameters():
            other = owners.setdefault(id(parameter), name)
            if other != name:
                raise UsageError(
                    f'strategy="rannc": {kind}.{other} and {kind}.{name} share a parameter, and each is partitioned; '
                    "put both into one module, and call that in training_step"
                )
    beside = {id(value) for child in no_layers(lightning_module).values() if child for value in child.parameters()}
    outside = [name for name, value in lightning_module.named_parameters() if id(value) not in {*owners, *beside}]
    if outside:
        more = f" (and {len(outside) - 1} more)" if len(outside) > 1 else ""
        raise UsageError(
            f'strategy="rannc": {outside[0]}{more} is not a parameter of '
            f"{', '.join(f'{kind}.{name}' for name in names)}, which {'is' if len(names) == 1 else 'are'} partitioned; "
            "put it into one of them, or all layers into one module"
        )


def _parts(lightning_module: LightningModule) -> Iterator[str]:
    """Names of the layers with parameters that can be called: those in lists, not the lists."""
    outside = no_layers(lightning_module)

    def below(prefix: str, module: nn.Module) -> Iterator[str]:
        for name, child in module.named_children():
            if not has_parameters(child) or (not prefix and name in outside):
                continue
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield from below(f"{prefix}{name}.", child)
            else:
                yield f"{prefix}{name}"

    return below("", lightning_module)


def _has_forward(lightning_module: LightningModule) -> bool:
    return type(lightning_module).forward is not LightningModule.forward


def _called_children(lightning_module: LightningModule) -> set[str]:
    """Attributes that are layers with parameters, and with which the steps compute.

    Follows the methods that they call by ``self.name``, but not ``forward``. A method without source mentions nothing.
    """
    kind, outside = type(lightning_module), no_layers(lightning_module)
    waiting, seen, found = [*STEPS], {"forward"}, set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for attribute, read in itertools.chain.from_iterable(map(_own_attributes, _definitions(kind, name))):
            if hasattr(kind, attribute):
                waiting.append(attribute)
                continue
            child = getattr(lightning_module, attribute, None)
            computes = read in (None, "forward") or isinstance(child, nn.ModuleList | nn.ModuleDict)
            if computes and isinstance(child, nn.Module) and attribute not in outside and has_parameters(child):
                found.add(attribute)
    return found


def _definitions(kind: type, name: str) -> Iterator[FunctionType]:
    """The method or property of a class, and of its bases if it has super() in it, without Lightning's and torch's."""
    for base in kind.__mro__:
        if issubclass(LightningModule, base) or name not in vars(base):
            continue
        value: Any = vars(base)[name]
        method: Any = value.fget if isinstance(value, property) else value
        function = inspect.unwrap(method)
        if isinstance(function, FunctionType):
            yield function
            if "super" in function.__code__.co_names:
                continue
        return


def _own_attributes(function: FunctionType) -> Iterator[tuple[str, str | None]]:
    """Each ``self.name`` in the source of a method, and what is read of that: ``self.name.read``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # made by exec, for example
        return
    own = function.__code__.co_varnames[:1]
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {id(node.value): node.attr for node in nodes}
    for node in nodes:
        if isinstance(node.value, ast.Name) and (node.value.id,) == own:
            yield node.attr, read.get(id(node))
