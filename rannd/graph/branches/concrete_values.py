"""Real values beside the traced ones, for tensors that are made of the call's tensors and of constants alone.

While a model is traced its tensors have no contents. A *shadow* is what a traced tensor holds for the mini-batch at
hand: each function that is called with shadowed tensors alone is run a second time, on the shadows, with all of its
rows (tracing itself has some example rows). In-place writes and views happen to the shadows, too, so that they share
memory as the traced tensors do. What reads a parameter or a buffer, draws random numbers, fails, or is large has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from rannd.graph.fx.leaf_op import NAME as LEAF

LARGEST = 64 * 2**20
"""Shadows have at most this many bytes."""


@dataclass
class Shadow:
    """The contents of one traced tensor."""

    tensor: torch.Tensor
    given: bool
    """Depends on the call's tensors (on the number of their rows, at least), not on constants alone."""


class _Unknown(Exception):
    """An argument has no shadow."""


class Shadows:
    """The shadows of one run of a model that is traced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._sizes: dict[Any, int] = {}
        """Values of symbols: the sizes of arguments, and numbers that depend on what is in a tensor."""

    def give(self, traced: torch.Tensor, real: torch.Tensor) -> None:
        """The shadow of an argument of the call is a copy of `real`."""
        with hidden():
            self._learn(traced.shape, real.shape)
            if type(real) in (torch.Tensor, nn.Parameter) and _may_have_one(real):
                self._known[traced] = Shadow(real.detach().clone(), given=True)

    def find(self, tensor: object) -> Shadow | None:
        """The shadow of a tensor, None where it has none."""
        found: Shadow | None = self._known.get(tensor) if isinstance(tensor, torch.Tensor) else None
        if found is None and type(tensor) is torch.Tensor and id(tensor) not in self._state:
            # Not a traced tensor, and no state of the model: the graph has it as a constant.
            with hidden():
                if _may_have_one(tensor):
                    found = self._known[tensor] = Shadow(tensor.detach().clone(), given=False)
        return found

    def number(self, value: Any) -> Any:
        """What a traced number (also a plain one) is for the mini-batch, None where that is not known."""
        try:
            return self._size(value, [False])
        except _Unknown:
            return None

    def follow(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch's as the model does, and do the same to the shadows."""
        tensors = [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        shadowed = [(tensor, shadow) for tensor in tensors if (shadow := self.find(tensor)) is not None]
        if tensors and not shadowed:
            return function(*args, **kwargs)
        with hidden():
            before = [(tensor._version, shadow.tensor._version) for tensor, shadow in shadowed]
        result = function(*args, **kwargs)
        made = [leaf for leaf in _leaves(result) if isinstance(leaf, torch.Tensor)]
        with hidden():
            touched = [tensor._version != old for (tensor, _), (old, _) in zip(shadowed, before, strict=True)]
            if getattr(function, "__name__", "") == "__set__":
                touched = [True] * len(shadowed)  # x.data = y leaves no trace in the version
        given = any(shadow.given for _, shadow in shadowed)
        values: list[torch.Tensor] | None = None
        if (made or any(touched)) and len(shadowed) == len(tensors) and _mirrored(function):
            values, sized = self._run(function, args, kwargs, made)
            given = given or sized
        with hidden():
            for (_, shadow), (_, old), real in zip(shadowed, before, touched, strict=True):
                if real or shadow.tensor._version != old:
                    self._touch(shadow, given, known=values is not None and real)
            if values is not None:
                kept = {id(tensor) for tensor, _ in shadowed}
                for traced, value in zip(made, values, strict=True):
                    if id(traced) not in kept or traced not in self._known:
                        self._known[traced] = Shadow(value, given)
                        self._learn(traced.shape, value.shape)
            elif isinstance(result, torch.SymInt) and getattr(function, "__name__", "") == "item":
                self._learn([result], [int(shadow.tensor) for _, shadow in shadowed])
        return result

    def _learn(self, sizes: Sequence[Any], real: Sequence[int]) -> None:
        """Sizes whose symbols are new have these values."""
        for size, value in zip(sizes, real, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                self._sizes.setdefault(size.node.expr, value)

    def _run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], made: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor] | None, bool]:
        """The tensors that a function makes of the shadows, and whether the number of rows is among its arguments."""
        sized = [False]
        try:
            with hidden():
                if _wrapped(*made) or any(_bytes(each, self.number(each.numel()) or 0) > LARGEST for each in made):
                    return None, False
                real_args, real_kwargs = self._real(tuple(args), sized), self._real(kwargs, sized)
                with _drawing() as drew:
                    values = [
                        leaf for leaf in _leaves(function(*real_args, **real_kwargs)) if isinstance(leaf, torch.Tensor)
                    ]
                if drew() or len(values) != len(made):
                    return None, False
                if any(v.dtype != t.dtype or v.ndim != t.ndim or v.is_meta for v, t in zip(values, made, strict=True)):
                    return None, False
                if any(_bytes(value, value.numel()) > LARGEST for value in values):  # not known before
                    return None, False
                if not any(isinstance(leaf, torch.Tensor) for leaf in _leaves((args, kwargs))):
                    values = [value.clone() for value in values]  # it may share memory with an array of the user's
                return values, sized[0]
        except Exception:  # whatever it is: there is no shadow
            return None, False

    def _touch(self, shadow: Shadow, given: bool, known: bool) -> None:
        """A tensor was written into: all that share its memory depend on the new content, or are not known any more."""
        home = shadow.tensor.untyped_storage()._cdata
        for traced, other in list(self._known.items()):
            if other.tensor.untyped_storage()._cdata == home:
                other.given = other.given or given
                if not known:
                    del self._known[traced]

    def _real(self, value: Any, sized: list[bool]) -> Any:
        """An argument for the shadows' run."""
        if isinstance(value, torch.Tensor):
            shadow = self.find(value)
            if shadow is None:
                raise _Unknown
            return shadow.tensor
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(value, sized)
        if isinstance(value, torch.Size):
            return torch.Size([self._size(size, sized) for size in value])
        if isinstance(value, slice):
            return slice(*(self._real(each, sized) for each in (value.start, value.stop, value.step)))
        if type(value) in (list, tuple):
            return type(value)(self._real(each, sized) for each in value)
        if type(value) is dict:
            return {key: self._real(each, sized) for key, each in value.items()}
        return value

    def _size(self, value: Any, sized: list[bool]) -> Any:
        """A number that may be made of the number of rows."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        expr = value.node.expr
        symbols = expr.free_symbols
        values = {symbol: self._sizes.get(symbol) for symbol in symbols}
        if None in values.values():
            raise _Unknown
        sized[0] = sized[0] or bool(symbols)
        found = expr.subs(values)
        if isinstance(value, torch.SymBool):
            return bool(found)
        return int(found) if isinstance(value, torch.SymInt) else float(found)


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Run code on real tensors, unseen by whatever traces."""
    with torch._C.DisableTorchFunction(), no_python_dispatcher(), _disable_current_modes(), torch.no_grad():
        yield


@contextlib.contextmanager
def _drawing() -> Iterator[Callable[[], bool]]:
    """Gives a function that tells, at the end, whether random numbers were drawn. They are put back."""
    cuda = torch.cuda.is_initialized()
    before = torch.get_rng_state()
    device = torch.cuda.get_rng_state() if cuda else None
    drew: list[bool] = []
    try:
        yield lambda: drew[0] if drew else _changed(before, device)
    finally:
        drew.append(_changed(before, device))
        if drew[0]:
            torch.set_rng_state(before)
            if device is not None:
                torch.cuda.set_rng_state(device)


def _changed(before: torch.Tensor, device: torch.Tensor | None) -> bool:
    if not torch.equal(torch.get_rng_state(), before):
        return True
    return device is not None and not torch.equal(torch.cuda.get_rng_state(), device)


def _mirrored(function: Callable[..., Any]) -> bool:
    """Whether a function may be run twice: leaves run the user's code, and inside of vmap tensors are others."""
    name = getattr(function, "name", None)
    if callable(name) and isinstance(function, torch._ops.OpOverload) and name().split(".")[0] == LEAF:
        return False
    if isinstance(function, torch._ops.OpOverloadPacket) and function._qualified_op_name == LEAF:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def _may_have_one(tensor: torch.Tensor) -> bool:
    return not (_wrapped(tensor) or tensor.is_meta) and _bytes(tensor, tensor.numel()) <= LARGEST


def _wrapped(*tensors: torch.Tensor) -> bool:
    """Whether some of the tensors stand for others (inside of vmap, grad)."""
    return any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors)


def _bytes(tensor: torch.Tensor, elements: Any) -> int:
    return int(elements) * tensor.dtype.itemsize


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, slice):
        yield from _leaves((value.start, value.stop, value.step))
    else:
        yield value
