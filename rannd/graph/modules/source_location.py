"""Find the user's module and source line behind an exception, or behind code that a graph cannot represent."""

from __future__ import annotations

import contextlib
import re
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

_GRADIENT_HOOKS = declare("hooks of gradients", torch.Tensor, "register_hook", "export drops hooks of tensors")
_SAVED = declare("hooks of saved tensors", saved_tensors_hooks, "__enter__", "export drops what they change")
_INFERENCE = declare("inference_mode", torch.inference_mode, "__enter__", "export drops the mode")


@dataclass(frozen=True)
class SourceLocation:
    """A location in user code."""

    modules: tuple[str, ...]
    """Dotted paths of the running modules, innermost first; the last is '', the model itself."""
    line: str
    """', at FILE:LINE', or ''."""
    exact: bool = True
    """False if the innermost module is not one of the model's (torch traces copies of some), or none was found."""


class Offence(BaseException):
    """User code has an effect that torch.export silently drops: custom gradients, random numbers of numpy, and others.

    Not an Exception, so that user code cannot catch it and take a different branch. Strict export drops the effect as
    well, unless `strict_keeps`.
    """

    def __init__(
        self,
        what: str,
        place: SourceLocation,
        loss: str = "whose backward a graph would lose",
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
        """The custom Function whose calls may become operators instead."""


_OWN = ("rannd.graph", "rannd.runtime")
"""Packages whose frames are not user code."""

_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in ', re.MULTILINE)
_LONGEST_FILE = 100
"""Characters of a folder and a file."""

HARMLESS_HOOKS = (save_on_cpu,)
"""Hooks of saved tensors that only change where these are stored."""


@contextlib.contextmanager
def watch_gradients(model: nn.Module, opaque: Collection[type[torch.autograd.Function]] = ()) -> Iterator[None]:
    """Raise Offence during tracing if user code customizes gradients, except by the Functions in `opaque`.

    torch.export traces through the forward of a custom ``autograd.Function`` and drops its backward; it drops hooks of
    tensors, too. Gradients would be silently wrong.
    """

    def applied(cls: type[torch.autograd.Function]) -> None:
        generated = cls.__name__.startswith("GeneratedBackwardFor_")  # of torch.library; the graph has its operator
        if not generated and cls not in opaque:
            what = f"runs the custom autograd.Function {cls.__module__}.{cls.__qualname__}"
            raise Offence(what, here(model), function=cls)

    def hooked(*_: Any, **__: Any) -> Any:
        raise Offence("registers a hook for the gradient of a tensor", here(model), "which a graph would lose")

    def entered(enter: Callable[..., None], hooks: saved_tensors_hooks) -> None:
        users = not (type(hooks).__module__.startswith("torch.") and of_torch(caller().f_code.co_filename))
        if users and type(hooks) not in HARMLESS_HOOKS:
            raise Offence("uses saved_tensors_hooks", here(model), "which a graph would lose")
        enter(hooks)

    def inferring(enter: Callable[..., None], mode: torch.inference_mode) -> None:
        if mode.mode and not of_torch(caller().f_code.co_filename):
            raise Offence("enters inference_mode", here(model), "which a graph would lose")
        enter(mode)

    uses = _GRADIENT_HOOKS.around(hooked), _SAVED.around(entered), _INFERENCE.around(inferring)
    with patched(*uses), watched_nodes(applied):
        yield


class NodesUnseen(TorchFunctionMode):
    """Raises Offence if user code reads the grad_fn of a tensor, which an exported graph cannot provide."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__self__", None) is torch.Tensor.grad_fn:
            raise Offence("uses the grad_fn of a tensor", here(self._model), "which is not there in a graph")
        return func(*args, **(kwargs or {}))


def here(model: nn.Module) -> SourceLocation:
    """Location of the user code that is running in the current stack."""
    frames = []
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return place_of(model, frames)


def of_exception(model: nn.Module, problem: BaseException) -> SourceLocation:
    """Location of the user code that raised an exception."""
    frames: list[types.FrameType] = []
    seen: set[int] = set()
    cause: BaseException | None = problem
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)][::-1] + frames
        cause = cause.__cause__ or cause.__context__
    return place_of(model, frames)


def of_torch(filename: str) -> bool:
    """Whether a file is part of torch."""
    return filename.startswith(sys.modules["torch"].__path__[0])


def place_of(model: nn.Module, frames: list[types.FrameType]) -> SourceLocation:
    """Location of the innermost user code in a stack; `frames` starts with the innermost."""
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


def source_line(stack: str) -> str:
    """Return the innermost line of user code in a stack as torch.fx writes it: ``examples/tutorial.py:27``, or ''."""
    own = (sys.modules["torch"].__path__[0], *(sys.modules[name].__path__[0] for name in _OWN if name in sys.modules))
    found = [(file, line) for file, line in _FRAME.findall(stack) if not file.startswith((*own, "<"))]
    return f"{'/'.join(found[-1][0].split('/')[-2:])[-_LONGEST_FILE:]}:{found[-1][1]}" if found else ""


def described(model: nn.Module, path: str) -> str:
    """Describe a part of the model in words, with its class."""
    if is_function(path):
        return f"the autograd.Function {function_name(path)}"
    name, method = split_path(path)
    kind = type(model.get_submodule(name)).__qualname__
    where = f"module {name} ({kind})" if name else f"the model ({kind})"
    return f"method {method} of {where}" if method else where


def in_words(problem: BaseException) -> str:
    """The first line of an exception, with an explanation if it is about data-dependent code."""
    if isinstance(problem, Offence):
        return f"it {problem.what}, {problem.loss}"
    first = str(problem).strip().splitlines() or [""]
    hint = ""
    if "data-dependent" in str(problem).lower() or "DataDependent" in type(problem).__name__:
        hint = " (data-dependent control flow cannot be part of a graph)"
    return f"{type(problem).__name__}: {first[0]}{hint}"
