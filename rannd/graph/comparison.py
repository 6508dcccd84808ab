"""Verify a graph against its model by running both on the same rows with the same random numbers.

Compares the outputs, the gradients of parameters and arguments (of a weighted sum of all outputs), the buffers, and
the parameters written in place.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rannd.device.generators import kept_generators, seed_all
from rannd.device.identity import is_usable
from rannd.graph.call.containers import plain_output
from rannd.graph.fx.aliasing import is_random_operator
from rannd.graph.fx.sizes import number_at
from rannd.graph.model import ModelGraph
from rannd.graph.modules.autograd_functions import direct_checkpoints
from rannd.graph.modules.foreign_rng import draw_once
from rannd.graph.modules.parameter_undo import Writes
from rannd.graph.partition.cut import extract
from rannd.graph.rows.loss_weights import counted, pieces_weights
from rannd.graph.tracing.leaf_recorder import undone
from rannd.graph.tracing.on_device import running_on

MOST_ROWS = 2
"""Maximum number of rows in a comparison, unless the graph has a fixed batch size."""

RELATIVE = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Maximum difference of a value per dtype, relative to the largest element of its tensor."""
RELATIVE_HALF = 0.05
NOISE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Additional tolerance for gradients per dtype, relative to the largest of all gradients: sums that would be zero
without rounding have a large relative error."""
NOISE_HALF = 2e-3

_INCOMPARABLE = float("inf")
"""Difference of values that cannot be subtracted: of another type or shape, or missing."""

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem")
"""Namespaces of collective operators, which wait for other ranks."""


@dataclass(frozen=True)
class Mismatch:
    """The first value that differs between a graph and its model."""

    what: str
    """'output 0', 'the gradient of layers.0.weight' .."""
    by: float
    """Difference relative to the model's value; infinite if it is missing or has another shape."""

    def __str__(self) -> str:
        return f"{self.what} differs by {self.by:.3g} (relative)" if self.by < float("inf") else f"{self.what} differs"


class NotComparable(Exception):
    """A graph and its model cannot be compared; the message says why."""


class NotRepeatable(NotComparable):
    """The model itself gives different results in two calls."""


class _CallsCollective(BaseException):
    """The model runs a collective. A BaseException, so that its code does not catch it and continue differently."""


@dataclass(frozen=True)
class _Outcome:
    outputs: list[Any]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    half: bool
    """Whether autocast may have used half precision."""


def compare_few(model: nn.Module, graph: ModelGraph, tensors: Sequence[torch.Tensor]) -> Mismatch | None:
    """Like compare, on the first rows of a call if possible, otherwise on all of them.

    Some models need more than two rows: BatchNorm, or a graph network whose edges refer to missing rows.
    """
    tensors = _there(graph, tensors)
    few = rows_to_compare(graph, tensors)
    try:
        return compare(model, graph, few)
    except NotComparable:
        if graph.signature.rows(few) == graph.signature.rows(tensors):
            raise
        return compare(model, graph, tensors)


def compare(
    model: nn.Module, graph: ModelGraph, tensors: Sequence[torch.Tensor], *, gradients: bool = True
) -> Mismatch | None:
    """Return the first difference between a graph and its model, None if they compute the same.

    Both run on the graph's device, wherever the model and `tensors`, those of a call of the graph, are. Buffers,
    attributes and random number generators changed by running the model are restored. NotComparable if the model cannot
    run here, is not deterministic, or returns nothing that can be compared.
    """
    wanted = gradients and graph.signature.mode.grad
    tensors = _there(graph, tensors)
    try:
        with running_on(graph.device, model), _restored_rng():
            return _compared(model, graph, tensors, wanted)
    except _CallsCollective:
        raise NotComparable("its code calls collectives, which wait for other ranks") from None
    except NotComparable:
        raise
    except Exception as exc:
        raise NotComparable(f"{type(exc).__name__}: {_first_line(exc)}") from exc


def _there(graph: ModelGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the graph's device. NotComparable if this process has none."""
    if not is_usable(graph.device):
        raise NotComparable(f"torch sees no {graph.device.type} device here")
    return [tensor.detach().to(graph.device) for tensor in tensors]


def _compared(model: nn.Module, graph: ModelGraph, tensors: Sequence[torch.Tensor], gradients: bool) -> Mismatch | None:
    expected = _of_model(model, graph, tensors, gradients)
    if not _finite(expected):
        raise NotComparable("the model's outputs are not finite")
    try:
        found = _of_graph(model, graph, tensors, gradients)
    except torch.OutOfMemoryError as exc:
        raise NotComparable(_first_line(exc)) from exc
    except Exception as exc:
        return Mismatch(f"the graph fails ({type(exc).__name__}: {_first_line(exc)}), and so", _INCOMPARABLE)
    difference = _difference(expected, found)
    if difference is None:
        return None
    again = _difference(expected, _of_model(model, graph, tensors, gradients))
    if again is not None:
        raise NotRepeatable(f"the model gives different results in two calls: {again}")
    return difference


def rows_to_compare(graph: ModelGraph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Select the first rows of a call for a comparison; all rows if the graph has a fixed batch size.

    At most two rows, and at most half of the mini-batch: model and graph both run, and together they should take no
    longer than a step.
    """
    rows = graph.signature.rows(tensors)
    count = max(1, min(MOST_ROWS, rows // 2))
    few = [
        tensor[:count] if spec.batch else tensor for spec, tensor in zip(graph.signature.tensors, tensors, strict=True)
    ]
    if graph.signature.fixed_rows is not None or count in graph.traced.holes:
        return list(tensors)
    decisions = graph.traced.decisions
    if decisions is not None and not decisions.hold(few):
        return list(tensors)
    return few


class _SeedEachOperator(TorchDispatchMode):
    """Dispatch mode that seeds each random operator from its name and shapes, independent of earlier draws.

    A graph may draw in a different order than its model, or more: it computes both sides of a branch on a random
    number.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met: dict[torch.Generator, torch.Tensor] = {}
        """The script's own generators, and their states before the comparison."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise _CallsCollective
        if is_random_operator(func):
            given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            seed = zlib.crc32(repr((str(func), [tuple(each.shape) for each in given])).encode())
            generator = kwargs.get("generator")
            if isinstance(generator, torch.Generator):
                self.met.setdefault(generator, generator.get_state())
                generator.manual_seed(seed)
            else:
                seed_all(seed)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _restored_rng() -> Iterator[None]:
    """Restore torch's RNG state afterwards, and clear the autocast cache."""
    with kept_generators():
        try:
            yield
        finally:
            torch.clear_autocast_cache()


@contextlib.contextmanager
def _equal_conditions(model: nn.Module) -> Iterator[Writes]:
    """Run model or graph under equal conditions and undo its side effects; yields the writes into its parameters."""
    torch.clear_autocast_cache()  # cached casts of weights belong to the autograd graph of another run
    seed_all(0)
    draws: Any = _SeedEachOperator
    equal = draws()
    with undone(model) as written:  # which restores generators in attributes
        try:
            draw_once(model)  # reveals graphs that hold a random number drawn during tracing as a constant
            with _without_hooks(model), direct_checkpoints(), equal:
                yield written
        finally:
            for generator, state in equal.met.items():
                generator.set_state(state)


@contextlib.contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Disable the script's tensor hooks of parameters, which may have side effects such as counting."""
    hooks = [(each, dict(each)) for p in model.parameters() if (each := p._backward_hooks)]
    for each, _ in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, before in hooks:
            each.update(before)


def _of_model(model: nn.Module, graph: ModelGraph, tensors: Sequence[torch.Tensor], gradients: bool) -> _Outcome:
    leaves = _fresh(tensors, graph)
    args, kwargs = graph.signature.unflatten(leaves)
    with _equal_conditions(model) as written:
        outputs = pytree.tree_leaves(plain_output(model(*args, **kwargs), []))
        return _outcome(model, graph, outputs, leaves, gradients, written)


def _of_graph(model: nn.Module, graph: ModelGraph, tensors: Sequence[torch.Tensor], gradients: bool) -> _Outcome:
    leaves = _fresh(tensors, graph)
    rows = graph.signature.rows(tensors)
    counts = counted(graph.label_counts, leaves)
    device = leaves[0].device
    weights = pieces_weights(
        graph.weights, world=1, rows=rows, rank_rows=rows, total_rows=rows, counts=counts, device=device
    )
    given = [*leaves, *weights]
    values = dict(zip(graph.traced.placeholders, given, strict=True))
    part = extract(graph.traced, graph.placement, set(graph.placement.placed), "Whole")
    with _equal_conditions(model) as written:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **graph.traced.constants}
        made = part.module(
            *(values[node] for node in part.inputs), *(state[name] for name in part.tensors), *part.numbers_at(rows)
        )
        computed = dict(zip(part.outputs, made, strict=True))
        ordered = [
            computed[node] if node in computed else number_at(node.meta["val"], rows) for node in graph.traced.results
        ]
        outputs = pytree.tree_leaves(graph.traced.outputs.unflatten(ordered))
        return _outcome(model, graph, outputs, leaves, gradients, written)


def _fresh(tensors: Sequence[torch.Tensor], graph: ModelGraph) -> list[torch.Tensor]:
    return [
        tensor.detach().clone().requires_grad_(spec.requires_grad)
        for spec, tensor in zip(graph.signature.tensors, tensors, strict=True)
    ]


def _outcome(
    model: nn.Module,
    graph: ModelGraph,
    outputs: list[Any],
    leaves: Sequence[torch.Tensor],
    gradients: bool,
    written: Writes,
) -> _Outcome:
    found: dict[str, torch.Tensor] = {}
    differentiable = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if gradients and differentiable:
        wanted: dict[str, torch.Tensor] = {}
        for name, each in model.named_parameters():
            if each.requires_grad:
                wanted[f"parameter {name}"] = each
        for spec, leaf in zip(graph.signature.tensors, leaves, strict=True):
            if leaf.requires_grad:
                wanted[f"argument {spec.name}"] = leaf
        given = [_weights(each) for each in differentiable]
        made = torch.autograd.grad(differentiable, list(wanted.values()), given, allow_unused=True)
        found = {name: each for name, each in zip(wanted, made, strict=True) if each is not None}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    buffers |= {name: value.clone() for name, value in written.values().items()}
    plain = [each.detach() if isinstance(each, torch.Tensor) else each for each in outputs]
    return _Outcome(plain, found, buffers, bool(graph.signature.mode.autocast))


def _weights(output: torch.Tensor) -> torch.Tensor:
    """Gradients of an output to start backward with, different per element so that sums do not cancel by chance."""
    count = torch.arange(output.numel(), device=output.device, dtype=torch.float64)
    return (0.75 + 0.5 * torch.frac(count * 0.6180339887)).to(output.dtype).reshape(output.shape)


def _finite(outcome: _Outcome) -> bool:
    """Whether any output has a finite element to compare."""
    tensors = [each for each in outcome.outputs if isinstance(each, torch.Tensor)]
    return any(bool(_dense(each).isfinite().any()) for each in tensors if each.numel())


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Convert to dense: gradients of embeddings may be sparse."""
    return value if value.layout is torch.strided else value.to_dense()


def _difference(expected: _Outcome, found: _Outcome) -> Mismatch | None:
    """First mismatch; gradients are compared from the last parameter on, since errors propagate to earlier ones."""
    half = expected.half
    if len(expected.outputs) != len(found.outputs):
        return Mismatch("the number of outputs", _INCOMPARABLE)
    for place, (value, other) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        by = _relative_error(value, other, 0.0, half)
        if by is not None:
            return Mismatch(f"output {place}", by)
    largest = max((_largest(each) for each in expected.gradients.values()), default=0.0)
    for name in reversed(list(dict.fromkeys([*expected.gradients, *found.gradients]))):
        value, other = expected.gradients.get(name), found.gradients.get(name)
        if value is None or other is None:  # in graphs, unused tensors may have a zero gradient instead of None
            only = value if value is not None else other
            assert only is not None
            by = _relative_error(torch.zeros_like(only), only, largest, half)
        else:
            by = _relative_error(value, other, largest, half)
        if by is not None:
            return Mismatch(f"the gradient of {name}", by)
    for name in dict.fromkeys([*expected.buffers, *found.buffers]):
        if name not in expected.buffers or name not in found.buffers:
            return Mismatch(f"what is written into {name}", _INCOMPARABLE)
        by = _relative_error(expected.buffers[name], found.buffers[name], 0.0, half)
        if by is not None:
            return Mismatch(f"what is written into {name}", by)
    return None


def _relative_error(value: Any, other: Any, largest: float, half: bool) -> float | None:
    """Difference of two values relative to the first, None if it is within tolerance.

    `largest` is the largest absolute value of all tensors of this kind.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = type(value) is type(other) and (value == other or (value != value and other != other))
        return None if same else _INCOMPARABLE
    if value.shape != other.shape or value.dtype != other.dtype:
        return _INCOMPARABLE
    value, other = _dense(value), _dense(other)
    if not value.numel() or torch.equal(value, other):
        return None
    if value.dtype == torch.bool or not (value.is_floating_point() or value.is_complex()):
        return _INCOMPARABLE
    by, size = float((value - other).abs().max()), float(value.abs().max())
    if not (math.isfinite(by) and math.isfinite(size)):
        same = value.isfinite()
        if bool((same != other.isfinite()).any()):
            return _INCOMPARABLE
        wide = torch.complex128 if value.is_complex() else torch.float64
        one, two = value[same].to(wide), other[same].to(wide)
        if not one.numel():
            return None
        by, size = float((one - two).abs().max()), float(one.abs().max())
    real = value.real.dtype if value.is_complex() else value.dtype
    relative, noise = RELATIVE.get(real, RELATIVE_HALF), NOISE.get(real, NOISE_HALF)
    if half:
        relative, noise = RELATIVE_HALF, NOISE_HALF
    return None if by <= relative * size + noise * largest else by / max(size, noise * largest, 1e-300)


def _largest(value: torch.Tensor) -> float:
    value = _dense(value)
    if not value.numel():
        return 0.0
    found = float(value.abs().max())
    if math.isfinite(found):
        return found
    finite = value[value.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _first_line(exc: BaseException) -> str:
    return (str(exc).strip().splitlines() or [""])[0]
