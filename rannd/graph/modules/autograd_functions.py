"""Trace calls of custom ``autograd.Function`` classes as opaque operators.

torch.export traces through the forward of such a class and drops its backward. A call whose arguments and results are
tensors and constants becomes a single operator of the graph, which applies the class itself; the code around it is
traced as usual. User code may call ``apply`` under any name (an alias, an attribute, a partial), but torch always calls
``forward`` of the class and creates an autograd node, so these two are patched, not ``apply``.

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
from rannd.torch_mends import no_recomputing

_NODES = declare(
    "nodes of custom Functions", BackwardCFunction, "__init__", "each call of a Function creates one, under any name"
)
_CHECKPOINTS = declare(
    "reentrant checkpoints", CheckpointFunction, "apply", "the planner decides what to recompute; gradients get lost"
)
_FORWARD = Patch("the forward of a Function", None, "forward", "a call becomes one operator")
_SETUP = Patch("the context of a Function", None, "setup_context", "an operator that replaces it saves nothing")

_PREFIX = "..function "

_seen: weakref.WeakValueDictionary[str, type[Function]] = weakref.WeakValueDictionary()
"""Classes that were used, by path. Classes defined inside functions cannot be imported by name."""


class FunctionPart(nn.Module):
    """Wraps a Function as a module that applies the class. It has no state; parameters are among its arguments."""

    function: type[Function]
    own_forward: Callable[..., Any]

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.__dict__["function"] = function
        self.__dict__["own_forward"] = function.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


def function_path(function: type[Function]) -> str:
    """Return the path of a class, and remember the class by it."""
    path = f"{_PREFIX}{function.__module__}:{function.__qualname__}"
    _seen[path] = function
    return path


def is_function(path: str) -> bool:
    """Whether a path refers to a Function."""
    return path.startswith(_PREFIX)


def function_name(path: str) -> str:
    """The dotted name of the class at a path."""
    return path.removeprefix(_PREFIX).replace(":", ".")


def function_part(path: str) -> FunctionPart:
    """Find the class at a path. LookupError if the running program has none of this name."""
    found = _by_name(path) or _seen.get(path)
    if found is None:
        raise LookupError(f"the imported modules have no autograd.Function {function_name(path)}")
    return FunctionPart(found)


def found_by_name(path: str) -> bool:
    """Whether a later run of the program can find the class at a path by name."""
    function = _by_name(path)
    return function is not None and _seen.get(path, function) is function


def _by_name(path: str) -> type[Function] | None:
    """Look up a Function in the imported modules, without importing others; None if there is none."""
    module, _, name = path.removeprefix(_PREFIX).partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        if not isinstance(found, (types.ModuleType, type)):
            return None
        found = vars(found).get(part)
    return found if isinstance(found, type) and issubclass(found, Function) else None


def watched_nodes(called: Callable[[type[Function]], None]) -> contextlib.AbstractContextManager[None]:
    """Call `called` with the class of every Function that is applied, before its forward runs."""

    def made(init: Callable[..., None], node: Any, *args: Any, **kwargs: Any) -> None:
        called(type(node)._forward_cls)
        init(node, *args, **kwargs)

    return patched(_NODES.around(made))


@contextlib.contextmanager
def observed_forward(part: FunctionPart, observer: Callable[..., Any]) -> Iterator[None]:
    """Make each call of the class run `observer(forward, args, kwargs)`; `forward()` runs the original forward."""
    with_context = _takes_context(part.function)

    def forward(*args: Any, **kwargs: Any) -> Any:
        own = functools.partial(part.own_forward, *args, **kwargs)
        return observer(own, args[1:] if with_context else args, kwargs)

    with _applies(part, forward):
        yield


@contextlib.contextmanager
def _applies(part: FunctionPart, function: Callable[..., Any]) -> Iterator[None]:
    """Make ``apply`` of the class run `function` instead of its forward.

    Direct calls of ``forward`` by user code or another class still run the original.
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
    """Make calls of the class run `function(*args, **kwargs)` during tracing; they have no backward.

    `function` returns the results, and those of the result tensors that need no gradient.
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
    """Whether forward takes `ctx` as its first argument, in contrast to classes that define `setup_context`."""
    return function.setup_context is Function.setup_context


def _with_parameters(own: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` with the signature of `own`, which torch reads from its code since 2.15 to bind keywords."""
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
    called = "_" * (1 + max(map(len, names), default=0))  # longer than, and so different from, every parameter's name
    scope: dict[str, Any] = {called: function}
    exec(f"def forward({parameters}): return {called}({given})", scope)
    made = scope["forward"]
    made.__defaults__, made.__kwdefaults__ = getattr(own, "__defaults__", None), getattr(own, "__kwdefaults__", None)
    return functools.wraps(own)(made)


def direct_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Run reentrant activation checkpoints as plain calls.

    The planner decides what to recompute. A reentrant checkpoint records no gradients in its forward, and its backward
    would run the module in whatever state it has by then.
    """

    def apply(_: Any, function: Callable[..., Any], preserve: bool, *inputs: Any) -> Any:
        return function(*inputs)

    return patched(_CHECKPOINTS.around(apply))


@contextlib.contextmanager
def no_checkpoints() -> Iterator[None]:
    """Run activation checkpoints as plain calls during tracing: reentrant ones, and others where torch needs that."""
    with no_recomputing(), direct_checkpoints():
        yield
