"""Whose code it is: the user's module and line behind an exception, or behind what no graph can show."""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from rannd.graph.modules.autograd_functions import function_name, is_function, watched_nodes
from rannd.graph.modules.methods import split_path
from rannd.patches import caller, declare, patched

_GRADIENT_HOOKS = declare("hooks of gradients", torch.Tensor, "register_hook", "a graph forgets hooks of tensors")
_SAVED = declare("hooks of saved tensors", saved_tensors_hooks, "__enter__", "a graph forgets what they change")
_INFERENCE = declare("inference_mode", torch.inference_mode, "__enter__", "a graph forgets that it was entered")


@dataclass(frozen=True)
class SourceLocation:
    """Where in the user's code something is."""

    modules: tuple[str, ...]
    """Dotted paths of the modules that were running, innermost first; the last is '', the model itself."""
    line: str
    """', at FILE:LINE', or ''."""
    exact: bool = True
    """False where the innermost module is not one of the model's (torch traces copies of some), or none was seen."""


class Offence(BaseException):
    """Code of which tracing would silently lose something: gradients, or that random numbers are drawn.

    Not an Exception: the user's code must not be able to catch it and go another way than it usually goes.
    Strict export loses it just as silently, but where `strict_keeps`.
    """

    def __init__(
        self,
        what: str,
        place: SourceLocation,
        loss: str = "whose backward would be lost in a graph",
        *,
        strict_keeps: bool = False,
        function: type[torch.autograd.Function] | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.place = place
        self.loss = loss
        self.strict_keeps = strict_keeps
        self.function = function
        """The class whose calls may be operators instead."""


_OWN = ("rannd.graph", "rannd.runtime")
"""Packages whose frames are not the user's code."""

HARMLESS_HOOKS = (save_on_cpu,)
"""Hooks of saved tensors that only decide where these are kept."""


@contextlib.contextmanager
def watch_gradients(model: nn.Module, opaque: Collection[type[torch.autograd.Function]] = ()) -> Iterator[None]:
    """Raise Offence where code runs that has gradients of its own while it is traced, but for the `opaque` classes.

    Export runs through the forward of a custom ``autograd.Function`` and forgets its backward; it forgets hooks of
    tensors, too. Gradients would be silently wrong.
    """

    def applied(cls: type[torch.autograd.Function]) -> None:
        generated = cls.__name__.startswith("GeneratedBackwardFor_")  # torch.library's; the graph has the operator
        if not generated and cls not in opaque:
            what = f"runs the custom autograd.Function {cls.__module__}.{cls.__qualname__}"
            raise Offence(what, here(model), function=cls)

    def hooked(*_: Any, **__: Any) -> Any:
        raise Offence("registers a hook for the gradient of a tensor", here(model))

    def entered(enter: Callable[..., None], hooks: saved_tensors_hooks) -> None:
        users = not (type(hooks).__module__.startswith("torch.") and of_torch(caller().f_code.co_filename))
        if users and type(hooks) not in HARMLESS_HOOKS:
            raise Offence("has hooks for the tensors that are saved for the backward", here(model))
        enter(hooks)

    def inferring(enter: Callable[..., None], mode: torch.inference_mode) -> None:
        if mode.mode and not of_torch(caller().f_code.co_filename):
            raise Offence("enters inference_mode", here(model), "which a graph forgets")
        enter(mode)

    uses = _GRADIENT_HOOKS.around(hooked), _SAVED.around(entered), _INFERENCE.around(inferring)
    with patched(*uses), watched_nodes(applied):
        yield


class NodesUnseen(TorchFunctionMode):
    """Raises Offence where the user's code asks for a tensor's node in the autograd graph: there is none in a graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.grad_fn:
            raise Offence("uses the grad_fn of a tensor", here(self._model))
        return func(*args, **(kwargs or {}))


def here(model: nn.Module) -> SourceLocation:
    """Where in the user's code the caller is running."""
    frames = []
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return place_of(model, frames)


def of_exception(model: nn.Module, problem: BaseException) -> SourceLocation:
    """Where an exception arose."""
    frames: list[types.FrameType] = []
    seen: set[int] = set()
    cause: BaseException | None = problem
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)][::-1] + frames
        cause = cause.__cause__ or cause.__context__
    return place_of(model, frames)


def of_torch(filename: str) -> bool:
    """Whether a file belongs to torch."""
    return filename.startswith(sys.modules["torch"].__path__[0])


def place_of(model: nn.Module, frames: list[types.FrameType]) -> SourceLocation:
    """The user's code in a stack, innermost frame first."""
    names = {id(module): name for name, module in model.named_modules()}
    own = (sys.modules["torch"].__path__[0], *(sys.modules[name].__path__[0] for name in _OWN if name in sys.modules))
    modules: list[str] = []
    line = ""
    innermost: bool | None = None
    for frame in frames:
        filename = frame.f_code.co_filename
        users = not filename.startswith((*own, "<"))
        owner = frame.f_locals.get("self")
        if not line and users and (id(owner) in names or frame.f_code.co_name == "forward"):
            line = f", at {filename}:{frame.f_lineno}"
        if innermost is None and users and isinstance(owner, nn.Module):
            innermost = id(owner) in names
        if isinstance(owner, nn.Module) and id(owner) in names and names[id(owner)] not in modules:
            modules.append(names[id(owner)])
    return SourceLocation((*(name for name in modules if name), ""), line, exact=bool(innermost))


def described(model: nn.Module, path: str) -> str:
    """A part of the model in words."""
    if is_function(path):
        return f"the autograd.Function {function_name(path)}"
    name, method = split_path(path)
    kind = type(model.get_submodule(name)).__qualname__
    where = f"module {name} ({kind})" if name else f"the model ({kind})"
    return f"method {method} of {where}" if method else where


def in_words(problem: BaseException) -> str:
    """The first line of an exception, with a word on what it means."""
    if isinstance(problem, Offence):
        return f"it {problem.what}, {problem.loss}"
    first = str(problem).strip().splitlines() or [""]
    hint = ""
    if "data-dependent" in str(problem).lower() or "DataDependent" in type(problem).__name__:
        hint = " (Python code whose way depends on the values of tensors cannot be part of a graph)"
    return f"{type(problem).__name__}: {first[0]}{hint}"
