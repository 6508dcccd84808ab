"""Concrete values of fake tensors during tracing, for those computed from the call's tensors and constants alone.

Tensors have no contents during tracing. A *shadow* is the value of a traced tensor for the current mini-batch: a
function whose tensor arguments all have shadows runs a second time on these, with all rows of the mini-batch (tracing
uses only a few example rows). In-place writes and views are repeated on shadows, so that they alias as the traced
tensors do. Results of functions that read a parameter or a buffer, draw random numbers, fail, or are large have none.
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

from rannd.device.generators import generator_states, set_generator_states
from rannd.graph.fx.leaf_op import NAME as LEAF

LARGEST = 64 * 2**20
"""Maximum bytes of a shadow."""


@dataclass
class Shadow:
    """The concrete value of one traced tensor."""

    tensor: torch.Tensor
    given: bool
    """Whether it depends on the call's tensors (at least on their number of rows), not on constants alone."""


class _Unknown(Exception):
    """An argument has no shadow."""


class Shadows:
    """The shadows of one traced run of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._state = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._home = torch.device("cpu")
        """Device of the call's tensors, which stands for the one that the model is traced on."""
        self._sizes: dict[Any, int] = {}
        """Values of symbols: sizes of arguments, and data-dependent numbers."""

    def give(self, traced: torch.Tensor, real: torch.Tensor) -> None:
        """Set the shadow of an argument of the call to a copy of `real`."""
        with hidden():
            self._learn(traced.shape, real.shape)
            if type(real) in (torch.Tensor, nn.Parameter) and _may_have_one(real):
                self._known[traced] = Shadow(real.detach().clone(), given=True)
                self._home = real.device

    def find(self, tensor: object) -> Shadow | None:
        """Return the shadow of a tensor, None if it has none."""
        found: Shadow | None = self._known.get(tensor) if isinstance(tensor, torch.Tensor) else None
        if found is None and type(tensor) is torch.Tensor and id(tensor) not in self._state:
            # Neither a traced tensor nor state of the model, so it is a constant of the graph.
            with hidden():
                if _may_have_one(tensor):
                    found = self._known[tensor] = Shadow(tensor.detach().clone(), given=False)
        return found

    def number(self, value: Any) -> Any:
        """The value of a symbolic or plain number for the current mini-batch, None if it is unknown."""
        try:
            return self._size(value, [False])
        except _Unknown:
            return None

    def follow(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a torch function for the model, and repeat the call on the shadows."""
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
                touched = [True] * len(shadowed)  # x.data = y does not increment the version
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
        """Record the values of new symbols among `sizes`."""
        for size, value in zip(sizes, real, strict=True):
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                self._sizes.setdefault(size.node.expr, value)

    def _run(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], made: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor] | None, bool]:
        """Run a function on the shadows. Returns its tensors, and whether its arguments have symbolic numbers."""
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
                if any(_bytes(value, value.numel()) > LARGEST for value in values):  # data-dependent sizes
                    return None, False
                if not any(isinstance(leaf, torch.Tensor) for leaf in _leaves((args, kwargs))):
                    values = [value.clone() for value in values]  # they may share memory with the user's numpy array
                return values, sized[0]
        except Exception:  # whatever fails, the results only get no shadow
            return None, False

    def _touch(self, shadow: Shadow, given: bool, known: bool) -> None:
        """Update all shadows that share memory with a written one; drop them if the new content is not `known`."""
        home = shadow.tensor.untyped_storage()._cdata
        for traced, other in list(self._known.items()):
            if other.tensor.untyped_storage()._cdata == home:
                other.given = other.given or given
                if not known:
                    del self._known[traced]

    def _real(self, value: Any, sized: list[bool]) -> Any:
        """Convert an argument for the run on shadows; _Unknown if it has no concrete value."""
        if isinstance(value, torch.Tensor):
            shadow = self.find(value)
            if shadow is None:
                raise _Unknown
            return shadow.tensor
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(value, sized)
        if isinstance(value, torch.device) and value.type != "cpu":
            return self._home
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
        """The value of a number that may be symbolic; sets sized[0] if it is."""
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
    """Run code on real tensors, hidden from all active modes."""
    with torch._C.DisableTorchFunction(), no_python_dispatcher(), _disable_current_modes(), torch.no_grad():
        yield


@contextlib.contextmanager
def _drawing() -> Iterator[Callable[[], bool]]:
    """Restore torch's RNG state afterwards; yields a function that tells whether random numbers were drawn."""
    before = generator_states()
    drew: list[bool] = []
    try:
        yield lambda: drew[0] if drew else _changed(before)
    finally:
        drew.append(_changed(before))
        if drew[0]:
            set_generator_states(before)


def _changed(before: list[torch.Tensor]) -> bool:
    return not all(map(torch.equal, generator_states(), before))


def _mirrored(function: Callable[..., Any]) -> bool:
    """Whether a function may run twice: not leaves, which run user code, and not inside of torch.func transforms."""
    name = getattr(function, "name", None)
    if callable(name) and isinstance(function, torch._ops.OpOverload) and name().split(".")[0] == LEAF:
        return False
    if isinstance(function, torch._ops.OpOverloadPacket) and function._qualified_op_name == LEAF:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def _may_have_one(tensor: torch.Tensor) -> bool:
    return not (_wrapped(tensor) or tensor.is_meta) and _bytes(tensor, tensor.numel()) <= LARGEST


def _wrapped(*tensors: torch.Tensor) -> bool:
    """Whether any of the tensors is a functorch wrapper (inside of vmap, grad)."""
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
