"""Parts of a model that can be leaves, by path: modules, single methods of modules, custom Functions.

A single method becomes a leaf if it is the only part of a large module that cannot be exported.

The path of a method is that of its module, two dots (module names cannot contain dots), and its name:
``encoder..mask``. It may use the parameters and buffers registered in its module directly, but no submodules, since the
operator gets only those tensors.
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

_BY_SYNTAX = ("__call__", "__contains__", "__getitem__", "__iter__", "__len__")
"""Methods that code calls without their names."""


class Method(nn.Module):
    """Wraps a method as a module that calls the class's function on the owner and shares its direct state."""

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
    """Build the path of a method."""
    return f"{module}..{method}"


def split_path(path: str) -> tuple[str, str]:
    """Split a path into that of the module and the name of the method, '' if it has none."""
    module, _, method = path.partition("..")
    return module, method


def part_of(model: nn.Module, path: str) -> nn.Module:
    """Return the module, method or Function at a path; LookupError if the program has no such Function."""
    if is_function(path):
        return function_part(path)
    name, method = split_path(path)
    module = model.get_submodule(name)
    return Method(module, method) if method else module


def kind_of(part: nn.Module) -> str:
    """Qualified name of a part's class, for messages and hashes."""
    if isinstance(part, Method):
        return f"{type(part.owner).__qualname__}.{part.name}"
    if isinstance(part, FunctionPart):
        return f"{part.function.__module__}.{part.function.__qualname__}"
    return type(part).__qualname__


class ForeignUse(Exception):
    """A part uses tensors or modules other than its own."""


@contextlib.contextmanager
def own_state_only(model: nn.Module, part: nn.Module, given: Iterable[torch.Tensor] = ()) -> Iterator[None]:
    """Raise ForeignUse if a part reads tensors of the model that are neither its own nor `given`, or if a method calls
    other modules."""
    own = {id(tensor) for tensor in (*part.parameters(), *part.buffers(), *given)}
    foreign = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers()) if id(t) not in own}

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for leaf in pytree.tree_leaves((args, kwargs)):
                if id(leaf) in foreign:
                    raise ForeignUse(f"it reads {foreign[id(leaf)]}, which belongs to another module")
            return func(*args, **(kwargs or {}))

    def called(module: nn.Module, _: Any) -> None:
        if not isinstance(module, Method):
            raise ForeignUse(f"it calls a {type(module).__qualname__}")

    hooks = (MODULE_ENTERED.by(called),) if isinstance(part, Method) else ()
    with patched(*hooks), Watch():
        yield


@contextlib.contextmanager
def replaced(method: Method, function: Callable[..., Any]) -> Iterator[None]:
    """Make calls of the method run `function`."""
    own = method.owner.__dict__
    own[method.name] = function
    try:
        yield
    finally:
        del own[method.name]


def called_methods(module: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Names of user-defined methods of a module that `run` calls and whose code refers to none of its submodules."""
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


def called_in_forward(model: nn.Module) -> set[str]:
    """Names in the code of the `forward` of each module of a model, and of what that calls of its own class."""
    kinds = {type(module) for module in model.modules()}
    return set().union(*(_mentioned(kind, name, set()) for kind in kinds for name in ("forward", *_BY_SYNTAX)))


def is_own_method(module: nn.Module, name: str) -> bool:
    """Whether a module's class has a method of this name that may be a leaf."""
    return name in _methods(module)


def _methods(module: nn.Module) -> list[str]:
    """Names of functions in the classes derived from nn.Module, except `forward` and special methods."""
    found: list[str] = []
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        for name, value in vars(kind).items():
            if isinstance(value, types.FunctionType) and name != "forward" and not name.startswith("__"):
                found.append(name)
    return [name for name in dict.fromkeys(found) if name not in module.__dict__]


def _mentioned(kind: type, name: str, seen: set[str]) -> set[str]:
    """Names in the code of a method, and of the methods that it refers to."""
    function = getattr(kind, name, None)
    if name in seen or not isinstance(function, types.FunctionType):
        return set()
    seen.add(name)
    names = set().union(*(_names(each.__code__) for each in _wrapped(function)))
    return names.union(*(_mentioned(kind, other, seen) for other in names))


def _wrapped(function: types.FunctionType) -> list[types.FunctionType]:
    """A function, and those that it is a decoration of."""
    found = [function]
    for each in found:
        inner = [getattr(each, "__wrapped__", None), *_closed_over(each)]
        found += [other for other in inner if isinstance(other, types.FunctionType) and other not in found]
    return found


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    """Values of the variables around a function that it reads."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # the variable has no value
            yield cell.cell_contents


def _names(code: types.CodeType) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*inner)
