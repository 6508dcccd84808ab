"""Self-test of the tracer's hooks into torch: each is run on a tiny case whose result is known.

If a version of torch no longer calls a patched function, graphs silently lose what the hook detects. So each hook is
tested with the context managers that tracing uses; if one is not called, no graph can be trusted and the whole model
runs as one operator. All tests take some milliseconds, once per process; the daemon caches the result for a version of
torch.

Functions of C++ extensions (`cpp_functions.py`) are not tested, since that needs a compiler. A graph that loses one
fails the comparison with the model.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Bernoulli, Distribution
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rannd.device.identity import CUDA
from rannd.graph.branches.concrete_values import Shadows
from rannd.graph.branches.data_dependent import Deciding
from rannd.graph.fx.aliasing import is_random_operator
from rannd.graph.fx.fx_names import graph_module
from rannd.graph.modules.autograd_functions import FunctionPart, no_checkpoints, observed_forward, replaced_forward
from rannd.graph.modules.cpp_functions import watch_cpp_functions
from rannd.graph.modules.dropout_override import forced
from rannd.graph.modules.foreign_rng import watch_foreign_rng
from rannd.graph.modules.source_location import NodesUnseen, Offence, watch_gradients
from rannd.graph.tracing.export import unvalidated
from rannd.graph.tracing.on_device import seen_on


class _Triple(torch.autograd.Function):
    """A Function whose backward is three times the true gradient."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
        return a * 1

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 3


class _TripleLater(torch.autograd.Function):
    """The same, with `setup_context`."""

    @staticmethod
    def forward(a: torch.Tensor) -> torch.Tensor:
        return a * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 3


_alias: Any = _Triple.apply


class _Holder(nn.Module):
    """A module that runs a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: torch.Tensor) -> Any:
        return self.function(a)


_APPLIED: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "called directly": lambda a: _Triple.apply(a),  # type: ignore[no-untyped-call]
    "called by another name": lambda a: _alias(a),
    "kept in an attribute": _Holder(_Triple.apply),
    "kept in a partial": functools.partial(_Triple.apply),
    "with setup_context": lambda a: _TripleLater.apply(a),  # type: ignore[no-untyped-call]
}
"""Ways in which user code may call a custom Function."""


def _given() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def _offends(model: nn.Module, run: Callable[[], Any]) -> bool:
    try:
        run()
    except Offence:
        return True
    return False


def _watched(function: Callable[[torch.Tensor], Any]) -> bool:
    model = _Holder(function)
    with watch_gradients(model):
        return _offends(model, lambda: model(_given()))


def _replaced(function: Callable[[torch.Tensor], Any]) -> bool:
    part = FunctionPart(_TripleLater if function is _APPLIED["with setup_context"] else _Triple)
    seen: list[int] = []

    def observer(forward: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        seen.append(len(args))
        return forward()

    with observed_forward(part, observer):
        function(_given())
    with replaced_forward(part, lambda a: (a * 5, [])):
        replaced = function(_given())
    return seen == [1] and replaced.tolist() == [5.0, 5.0] and function(_given()).tolist() == [1.0, 1.0]


def _saved() -> bool:
    def run(a: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each * 2, lambda each: each):
            return a * a

    return _watched(run)


def _inference() -> bool:
    def run(a: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return a * a

    return _watched(run)


def _nodes() -> bool:
    model = _Holder(lambda a: (a * 2).grad_fn)
    with NodesUnseen(model):
        return _offends(model, lambda: model(_given()))


def _registered_operators() -> bool:
    """Detection of C++ functions raises no Offence for torch's own operators."""
    model = _Holder(lambda a: torch.ops.aten.mul.Tensor(a, a).sin())
    with watch_cpp_functions(model), NodesUnseen(model):
        return not _offends(model, lambda: model(_given()))


def _branch() -> bool:
    model = nn.Identity()
    real = torch.tensor([1.0, -3.0])
    shadows = Shadows(model)
    with FakeTensorMode():
        traced = torch.empty(2)
        shadows.give(traced, real)
        with Deciding(shadows) as deciding:
            negative = bool(traced.sum() > 0)
    return not negative and len(deciding.noted) == 1


def _size() -> bool:
    model = nn.Identity()
    unknown = ShapeEnv().create_unbacked_symint()
    with Deciding(Shadows(model)):
        return _offends(model, lambda: bool(unknown > 3))


def _draws(draw: Callable[[], object]) -> bool:
    def run(a: torch.Tensor) -> torch.Tensor:
        draw()
        return a

    model = _Holder(run)
    with watch_foreign_rng(model):
        return _offends(model, lambda: model(torch.ones(2)))


def _checkpoints(reentrant: bool) -> bool:
    with no_checkpoints():
        made = checkpoint(torch.sin, _given(), use_reentrant=reentrant)
    return bool(made.grad_fn.name() == "SinBackward0")


def _validated() -> bool:
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)  # torch.compile switches it off for the whole process
    try:
        with unvalidated():
            Bernoulli(probs=torch.tensor(2.0))
    finally:
        Distribution.set_default_validate_args(before)
    return True


def _names() -> bool:
    root = nn.Module()
    root.register_module("class", nn.Module())
    root.get_submodule("class").register_buffer('a"b', torch.ones(1))
    graph = Graph()
    graph.output(graph.get_attr('class.a"b'))
    return bool(graph_module(root, graph)().item() == 1.0)


def _elsewhere() -> bool:
    with seen_on(torch.device(CUDA, 0), [given := torch.ones(2)]), FakeTensorMode() as mode:
        return mode.from_tensor(given).device.type == CUDA and mode.from_tensor(torch.ones(2)).device.type == "cpu"


def _forced() -> bool:
    with forced(nn.Identity(), False):
        return torch.equal(functional.dropout(torch.ones(8), 0.9, training=True), torch.ones(8))


def _random() -> bool:
    aten = torch.ops.aten
    drawing = (aten.dropout.default, aten.bernoulli.default, aten.rand.default, aten.randn_like.default)
    return all(map(is_random_operator, drawing)) and not is_random_operator(aten.mul.Tensor)


_PROOFS: Mapping[str, Callable[[], bool]] = {
    **{f"a custom autograd.Function, {way}": functools.partial(_watched, run) for way, run in _APPLIED.items()},
    **{f"the forward of a Function, {way}": functools.partial(_replaced, run) for way, run in _APPLIED.items()},
    "hooks for gradients of tensors": functools.partial(_watched, lambda a: (a * 2).register_hook(lambda each: each)),
    "hooks for saved tensors": _saved,
    "inference_mode": _inference,
    "nodes of the autograd graph": _nodes,
    "registered operators": _registered_operators,
    "branches on tensors": _branch,
    "branches on unknown sizes": _size,
    "random numbers of numpy": functools.partial(_draws, lambda: np.random.random()),
    "random numbers of Python": functools.partial(_draws, random.random),
    "checkpoints (reentrant)": functools.partial(_checkpoints, True),
    "checkpoints": functools.partial(_checkpoints, False),
    "arguments of distributions": _validated,
    "names of attributes": _names,
    "dropout": _forced,
    "devices of tensors": _elsewhere,
    "random operators": _random,
}


_known: list[tuple[str, ...]] = []


def assume(found: tuple[str, ...]) -> None:
    """Use the result of another process with the same version of torch."""
    _known[:] = [found]


def failing() -> tuple[str, ...]:
    """Names of the hooks that this version of torch does not call; empty if all work. Tested once per process."""
    if not _known:
        _known.append(_tried())
    return _known[0]


def _tried() -> tuple[str, ...]:
    found = []
    for name, holds in _PROOFS.items():
        try:
            # Reset the modes that the script may be in.
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.device("cpu"),
                torch.random.fork_rng(devices=[]),
            ):
                if not holds():
                    found.append(name)
        except (Exception, Offence) as exc:
            found.append(f"{name} ({type(exc).__name__}: {str(exc).partition(chr(10))[0]})")
    return tuple(found)
