"""Parts of a model that can be leaves, by their paths: modules, single methods of modules, custom Functions.

Single methods are for a large module of which one method stands in the way.

The path of a method is that of its module, two dots (names of modules may have anything but dots), and its name:
``encoder..mask``. It may use the parameters and
buffers that its module holds itself, and nothing of the modules inside: the operator gets those tensors alone.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from rannd.graph.modules.autograd_functions import FunctionPart, function_part, is_function
from rannd.patches import MODULE_ENTERED, patched


class Method(nn.Module):
    """A method as a module: calling it calls the class's function on the owner; its state is the owner's own."""

    owner: nn.Module

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.__dict__["owner"] = owner
        self.name = name
        self.__dict__["_parameters"] = owner.__dict__["_parameters"]
        self.__dict__["_buffers"] = owner.__dict__["_buffers"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(type(self.owner), self.name)(self.owner, *args, **kwargs)


def method_path(module: str, method: str) -> str:
    """The path of a method."""
    return f"{module}..{method}"


def split_path(path: str) -> tuple[str, str]:
    """The path of a module, and the name of the method ('': none)."""
    module, _, method = path.partition("..")
    return module, method


def part_of(model: nn.Module, path: str) -> nn.Module:
    """The module at a path, the method, or the Function (LookupError where there is none of this name any more)."""
    if is_function(path):
        return function_part(path)
    name, method = split_path(path)
    module = model.get_submodule(name)
    return Method(module, method) if method else module


def kind_of(part: nn.Module) -> str:
    """The class of a part, for messages and hashes."""
    if isinstance(part, Method):
        return f"{type(part.owner).__qualname__}.{part.name}"
    if isinstance(part, FunctionPart):
        return f"{part.function.__module__}.{part.function.__qualname__}"
    return type(part).__qualname__


class ForeignUse(Exception):
    """A part uses more than its own tensors."""


@contextlib.contextmanager
def own_state_only(model: nn.Module, part: nn.Module, given: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Raise ForeignUse where a part reads tensors of the model that are neither its own nor `given`; a method also
    where it calls other modules."""
    own = {id(tensor) for tensor in (*part.parameters(), *part.buffers(), *given)}
    foreign = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers()) if id(t) not in own}

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in foreign:
                    raise ForeignUse(f"it reads {foreign[id(leaf)]}, which is not its own")
            return func(*args, **(kwargs or {}))

    def called(module: nn.Module, _: Any) -> None:
        if not isinstance(module, Method):
            raise ForeignUse(f"it calls a {type(module).__qualname__}")

    hooks = (MODULE_ENTERED.by(called),) if isinstance(part, Method) else ()
    with patched(*hooks), Watch():
        yield


@contextlib.contextmanager
def replaced(method: Method, function: Callable[..., Any]) -> Iterator[None]:
    """Let calls of the method run `function`."""
    own = method.owner.__dict__
    own[method.name] = function
    try:
        yield
    finally:
        del own[method.name]


def called_methods(module: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Methods of a module's class, written by the user, that `run` calls and that mention none of its submodules."""
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        for name in _methods(module):
            method = Method(module, name)

            def function(*args: Any, _method: Method = method, **kwargs: Any) -> Any:
                if _method.name not in found:
                    found.append(_method.name)
                return _method.forward(*args, **kwargs)

            stack.enter_context(replaced(method, function))
        run()
    return [name for name in found if not _mentioned(type(module), name, set()) & set(module._modules)]


def _methods(module: nn.Module) -> list[str]:
    """Plain functions of the classes below nn.Module, but for `forward` and what Python calls itself."""
    found: list[str] = []
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType) and name != "forward" and not name.startswith("__"):
                found.append(name)
    return [name for name in dict.fromkeys(found) if name not in module.__dict__]


def _mentioned(kind: type, name: str, seen: set[str]) -> set[str]:
    """Names in the code of a method, and in that of the methods that it mentions."""
    function = getattr(kind, name, None)
    if name in seen or not isinstance(function, types.FunctionType):
        return set()
    seen.add(name)
    names = _names(function.__code__)
    return names.union(*(_mentioned(kind, other, seen) for other in names))


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)
