"""Operators whose backward computes the gradient of the input alone, and queues what those of the parameters need.

Each function here takes a queue, the group of the operator's parameters (`weight_queue.Delayed`), and the arguments of
the ATen operator that it stands for. Where nothing is to be delayed it is that operator.

The Functions do not get parameters as tensors of their own, so that the first half of a backward ends at them. An input
without a gradient is accompanied by a tensor without elements that has one: otherwise autograd would run no backward.
Under autocast arguments are cast here, as autocast would do it, but outside of the Function, so that the cast is
differentiated: that of the input in the first half, that of a parameter in the second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rannd.graph.weight_gradients.gradient_formulas import (
    Convolution,
    added,
    flat,
    lookup_weight,
    product_weight,
)
from rannd.graph.weight_gradients.weight_queue import Delayed, WeightQueue

aten = torch.ops.aten


def linear(queue: WeightQueue, group: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``aten::linear``."""
    if not _delays(weight, bias):
        return aten.linear.default(input, weight, bias)  # type: ignore[no-any-return]
    return _apply(_Product, queue, group, input, weight, bias, True)


def matmul(queue: WeightQueue, group: int, input: Tensor, weight: Tensor) -> Tensor:
    """``aten::matmul`` (and ``mm``) of ``[.., in]`` by a parameter ``[in, out]``."""
    if not _delays(weight):
        return aten.matmul.default(input, weight)  # type: ignore[no-any-return]
    return _apply(_Product, queue, group, input, weight, None, False)


def addmm(queue: WeightQueue, group: int, bias: Tensor, input: Tensor, weight: Tensor) -> Tensor:
    """``aten::addmm`` of ``[rows, in]`` by a parameter ``[in, out]``, to which another one is added."""
    if not _delays(weight, bias):
        return aten.addmm.default(bias, input, weight)  # type: ignore[no-any-return]
    return _apply(_Product, queue, group, input, weight, bias, False)


def convolution(
    queue: WeightQueue,
    group: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """``aten::convolution`` of a batch, which all convolutions are."""
    if not _delays(weight, bias):
        return aten.convolution.default(  # type: ignore[no-any-return]
            input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
    plain = Convolution(tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
    return _apply(_Convolution, queue, group, input, weight, bias, plain)


def embedding(
    queue: WeightQueue, group: int, weight: Tensor, indices: Tensor, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """``aten::embedding`` with dense gradients."""
    if not _delays(weight):
        return aten.embedding.default(weight, indices, padding_idx, scale_grad_by_freq)  # type: ignore[no-any-return]
    read = _Read(queue, group, weight, None)
    found: Tensor = _Lookup.apply(indices, _starter(indices), read, padding_idx, scale_grad_by_freq)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True)
class _Read:
    """The parameters of an operator. In this, Functions do not see them."""

    queue: WeightQueue
    group: int
    weight: Tensor
    bias: Tensor | None

    def delay(self, gradients: Callable[[Sequence[Tensor | None]], Sequence[Tensor]]) -> None:
        """Queue the gradients of the parameters that need one, in the order of weight and bias.

        `gradients` must not hold this: with its queue it would be a cycle, whose tensors live until they are collected.
        """
        wanted = [each for each in (self.weight, self.bias) if each is not None and each.requires_grad]
        self.queue.add(Delayed(self.group, wanted, gradients))


def _delays(*parameters: Tensor | None) -> bool:
    """Whether a backward will ask for gradients of parameters."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in parameters)


def _starter(beside: Tensor) -> Tensor | None:
    """What makes autograd run the backward of an operator with this input."""
    return None if beside.requires_grad else torch.empty(0, device=beside.device, requires_grad=True)


def _apply(
    function: type[torch.autograd.Function],
    queue: WeightQueue,
    group: int,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plain: Any,
) -> Tensor:
    kind = x.device.type
    without: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
        without = torch.autocast(kind, enabled=False)
    with without:
        found: Tensor = function.apply(x, _starter(x), _Read(queue, group, weight, bias), plain)
    return found


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` as autocast gives it to a product: double precision stays as it is."""
    return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value


class _Product(torch.autograd.Function):
    """``x @ weight`` or ``x @ weight.t()``, plus a bias if there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, starter: Tensor | None, read: _Read, transposed: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.read, ctx.transposed = read, transposed
        weight, bias = read.weight, read.bias
        if transposed:
            made: Tensor = aten.linear.default(x, weight, bias)
        else:
            made = aten.matmul.default(x, weight) if bias is None else aten.addmm.default(bias, x, weight)
        # Of more dimensions it is a view of a matrix; code after it may write into it, which torch refuses for views.
        return made if x.dim() == 2 else aten._unsafe_view.default(made, made.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        upstream = flat(upstream)  # copied at most once
        ctx.read.delay(partial(_product_gradients, x, upstream, ctx.read.weight, ctx.read.bias, ctx.transposed))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight = ctx.read.weight
        return upstream.mm(weight if ctx.transposed else weight.t()).view(x.shape), None, None, None


def _product_gradients(
    x: Tensor, upstream: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, given: Sequence[Tensor | None]
) -> list[Tensor]:
    found = []
    if weight.requires_grad:
        found.append(product_weight(x, upstream, given[0], transposed=transposed))
    if bias is not None and bias.requires_grad:
        found.append(added(upstream.sum_to_size(bias.shape), given[-1]))
    return found


class _Convolution(torch.autograd.Function):
    """A convolution of a batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, starter: Tensor | None, read: _Read, plain: Convolution) -> Tensor:
        ctx.save_for_backward(x)
        ctx.read, ctx.plain = read, plain
        return plain.of(x, read.weight, read.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        ctx.read.delay(partial(_convolution_gradients, x, upstream, ctx.read.weight, ctx.read.bias, ctx.plain))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return ctx.plain.gradients(upstream, x, ctx.read.weight, (True, False, False))[0], None, None, None


def _convolution_gradients(
    x: Tensor,
    upstream: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plain: Convolution,
    given: Sequence[Tensor | None],
) -> list[Tensor]:
    wanted = (False, weight.requires_grad, bias is not None and bias.requires_grad)
    made = [each for each in plain.gradients(upstream, x, weight, wanted) if each is not None]
    return [added(gradient, before) for gradient, before in zip(made, given, strict=True)]


class _Lookup(torch.autograd.Function):
    """Rows of a table, by their indices."""

    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, starter: Tensor | None, read: _Read, padding_idx: int, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.read, ctx.plain = read, (padding_idx, by_frequency)
        made: Tensor = aten.embedding.default(read.weight, indices, padding_idx, by_frequency)
        return aten._unsafe_view.default(made, made.shape)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, ...]:
        (indices,) = ctx.saved_tensors
        ctx.read.delay(partial(_lookup_gradients, upstream, indices, ctx.read.weight.shape[0], *ctx.plain))
        return None, None, None, None, None


def _lookup_gradients(
    upstream: Tensor, indices: Tensor, rows: int, padding_idx: int, by_frequency: bool, given: Sequence[Tensor | None]
) -> list[Tensor]:
    return [lookup_weight(upstream, indices, given[0], rows, padding_idx, by_frequency=by_frequency)]
