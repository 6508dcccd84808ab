"""Gradients of the parameters of products, convolutions and lookups, from their input and the gradient of their output.

They are the kernels that autograd calls for the same operator, with the gradient of the input left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rannd.device.identity import is_accelerator


def flat(value: Tensor) -> Tensor:
    """``[.., n]`` as ``[rows, n]``: a view where memory allows it."""
    return value.unsqueeze(0) if value.dim() == 1 else value.flatten(0, -2)


def product_weight(x: Tensor, upstream: Tensor, given: Tensor | None, *, transposed: bool) -> Tensor:
    """Gradient of the weight of ``x @ weight``, or of ``x @ weight.t()`` if `transposed`.

    Args:
        x: ``[.., in]``.
        upstream: ``[rows, out]``, gradient of the product.
        given: What it is added to, in place; None: nothing.
        transposed: The weight, and so its gradient, is ``[out, in]``; otherwise ``[in, out]``.
    """
    left, right = (upstream, flat(x)) if transposed else (flat(x), upstream)
    return left.t().mm(right) if given is None else given.addmm_(left.t(), right)


def added(gradient: Tensor, given: Tensor | None) -> Tensor:
    """`gradient`, added to what is given in place; None: to nothing."""
    return gradient if given is None else given.add_(gradient)


@dataclass(frozen=True)
class Convolution:
    """The plain arguments of a convolution, one number per spatial dimension; also of a transposed one."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def of(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution itself."""
        return torch.ops.aten.convolution.default(  # type: ignore[no-any-return]
            x, weight, bias, self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        )

    def gradients(
        self, upstream: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of input, weight and bias: those that are `wanted`.

        `x`, `weight`, `upstream`: ``[batch, channels, ..]``, as of torch.nn.functional.conv2d and its like.
        """
        outputs = upstream.shape[1]
        found: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward.default(
            upstream, x, weight, [outputs], self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding, self.groups, list(wanted),
        )  # fmt: skip
        return found


def lookup_weight(
    upstream: Tensor, indices: Tensor, given: Tensor | None, rows: int, padding_idx: int, *, by_frequency: bool
) -> Tensor:
    """Gradient ``[rows, width]`` of the table of ``embedding``, added to what is given in place; None: to nothing.

    `upstream`: ``[*indices.shape, width]``. On a CPU, few rows are added without making a table of the others first; on
    accelerators that would add in any order, where torch's own kernel has one.
    """
    if given is None or by_frequency or indices.numel() > rows or is_accelerator(upstream.device):
        found: Tensor = torch.ops.aten.embedding_dense_backward.default(
            upstream, indices, rows, padding_idx, by_frequency
        )
        return added(found, given)
    places, gradients = indices.flatten(), flat(upstream)
    if padding_idx >= 0:
        gradients = gradients.masked_fill((places == padding_idx).unsqueeze(1), 0.0)
    return given.index_add_(0, places, gradients)
