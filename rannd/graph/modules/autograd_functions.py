"""Calls of custom ``autograd.Function`` classes as opaque operators, wherever they are called.

Export runs through the forward of such a class and forgets its backward. A call of one whose arguments and results are
tensors and constants becomes a single operator of the graph, which applies the class itself; the code around it is
traced as usual. torch calls ``forward`` and makes a node of the autograd graph under whatever name the user's code has
for ``apply`` (an alias, an attribute, a partial), so both are watched at the class, not at ``apply``.

The path of a class is two dots, a word, and where it is defined: ``..function package.module:Outer.Name``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction, Function
from torch.utils.checkpoint import CheckpointFunction

from rannd.patches import Patch, declare, patched
from rannd.torch_versions import no_recomputing

_NODES = declare(
    "nodes of custom Functions", BackwardCFunction, "__init__", "each call of a Function makes one, by whatever name"
)
_CHECKPOINTS = declare(
    "reentrant checkpoints", CheckpointFunction, "apply", "recomputing is the plan's business, its gradients are lost"
)
_FORWARD = Patch("the forward of a Function", None, "forward", "a call becomes one operator")
_SETUP = Patch("the context of a Function", None, "setup_context", "an operator in its place saves nothing")

_PREFIX = "..function "

_seen: weakref.WeakValueDictionary[str, type[Function]] = weakref.WeakValueDictionary()
"""Classes that are not found by their names (defined inside functions), by their paths."""


class FunctionPart(nn.Module):
    """A Function as a module: calling it applies the class. It has no state; parameters are among its arguments."""

    function: type[Function]
    own_forward: Callable[..., Any]

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.__dict__["function"] = function
        self.__dict__["own_forward"] = function.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def function_path(function: type[Function]) -> str:
    """The path of a class."""
    path = f"{_PREFIX}{function.__module__}:{function.__qualname__}"
    _seen[path] = function
    return path


def is_function(path: str) -> bool:
    """Whether a path is that of a Function."""
    return path.startswith(_PREFIX)


def function_name(path: str) -> str:
    """The dotted name of the class at a path."""
    return path.removeprefix(_PREFIX).replace(":", ".")


def function_part(path: str) -> FunctionPart:
    """The class at a path. LookupError where the running program has none of this name."""
    found = _by_name(path) or _seen.get(path)
    if found is None:
        raise LookupError(f"there is no autograd.Function {function_name(path)}")
    return FunctionPart(found)


def found_by_name(path: str) -> bool:
    """Whether a later run of the program finds the class at a path."""
    function = _by_name(path)
    return function is not None and _seen.get(path, function) is function


def _by_name(path: str) -> type[Function] | None:
    """The class among the modules that are imported; nothing is imported, and nothing but a Function is found."""
    module, _, name = path.removeprefix(_PREFIX).partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if not isinstance(found, (types.ModuleType, type)):
            return None
        found = vars(found).get(part)
    return found if isinstance(found, type) and issubclass(found, Function) else None


def watched_nodes(called: Callable[[type[Function]], None]) -> contextlib.AbstractContextManager[None]:
    """Call `called` with the class of each Function that is applied, before its forward runs."""

    def made(init: Callable[..., None], node: Any, *args: Any, **kwargs: Any) -> None:
        called(type(node)._forward_cls)
        init(node, *args, **kwargs)

    return patched(_NODES.around(made))


@contextlib.contextmanager
def observed_forward(part: FunctionPart, observer: Callable[..., Any]) -> Iterator[None]:
    """Let each call of the class run `observer(forward, args, kwargs)`; forward() runs the class's own."""
    with_context = _takes_context(part.function)

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = functools.partial(part.own_forward, *args, **kwargs)
        return observer(own, args[1:] if with_context else args, kwargs)

    with _applies(part, forward):
        yield


@contextlib.contextmanager
def _applies(part: FunctionPart, function: Callable[..., Any]) -> Iterator[None]:
    """Let ``apply`` of the class run `function` in place of its forward.

    The user's code, or another class, may call the forward as any other function, and gets it.
    """
    waiting: list[bool] = []

    def called(applied: type[Function]) -> None:
        if applied is part.function:
            waiting.append(True)

    def forward(_: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (function if waiting and waiting.pop() else part.own_forward)(*args, **kwargs)

    with watched_nodes(called), patched(_FORWARD.on(part.function).around(forward, _with_parameters)):
        yield


@contextlib.contextmanager
def replaced_forward(part: FunctionPart, function: Callable[..., Any]) -> Iterator[None]:
    """Let calls of the class run `function(*args, **kwargs)`, while the model is traced: they have no backward.

    It returns the results and, of these, the tensors that have no gradient.
    """
    cls = part.function
    constants: list[torch.Tensor] = []
    replaced: list[bool] = []
    with_context = _takes_context(cls)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if with_context:
            context, *given = args
            result, found = function(*given, **kwargs)
            context.mark_non_differentiable(*found)
            return result
        result, constants[:] = function(*args, **kwargs)
        replaced.append(True)
        return result

    def setup_context(own: Callable[..., None], ctx: Any, inputs: Any, output: Any) -> None:
        if not replaced:
            own(ctx, inputs, output)
            return
        replaced.pop()
        ctx.mark_non_differentiable(*constants)
        constants.clear()

    setups = () if with_context else (_SETUP.on(cls).around(setup_context),)
    with _applies(part, forward), patched(*setups):
        yield


def _takes_context(function: type[Function]) -> bool:
    """Whether the class's forward gets the context (there is another method for it since torch 2.0)."""
    return function.setup_context is Function.setup_context


def _with_parameters(own: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with the parameters of `own`: since 2.15 torch reads them from its code, to tell keyword arguments."""
    code = getattr(own, "__code__", None)
    if code is None:
        return function
    names = list(code.co_varnames)
    plain = names[: code.co_argcount]
    keywords = names[code.co_argcount :][: code.co_kwonlyargcount]
    rest = names[code.co_argcount + code.co_kwonlyargcount :]
    more = [f"*{rest.pop(0)}"] if code.co_flags & inspect.CO_VARARGS else []
    others = [f"**{rest[0]}"] if code.co_flags & inspect.CO_VARKEYWORDS else []
    parameters = ", ".join([*plain, *(more or ["*"] * bool(keywords)), *keywords, *others])
    given = ", ".join([*plain, *more, *(f"{name}={name}" for name in keywords), *others])
    called = "_" * (1 + max(map(len, names), default=0))  # no parameter's name
    scope: dict[str, Any] = {called: function}
    exec(f"def forward({parameters}): return {called}({given})", scope)
    made = scope["forward"]
    made.__defaults__, made.__kwdefaults__ = getattr(own, "__defaults__", None), getattr(own, "__kwdefaults__", None)
    return functools.wraps(own)(made)


def direct_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Run what the user checkpoints (reentrant) without it: recomputing is the plan's business, its forward records no
    gradients, and its backward would run a module as it then is."""

    def apply(_: Any, function: Callable[..., Any], preserve: bool, *inputs: Any) -> Any:
        return function(*inputs)

    return patched(_CHECKPOINTS.around(apply))


@contextlib.contextmanager
def no_checkpoints() -> Iterator[None]:
    """Run what the user checkpoints without it, while a model is traced: in either way, where torch needs that."""
    with no_recomputing(), direct_checkpoints():
        yield
