"""What counts as a difference between a value of a step and its replay.

A replay computes a block from the same values, with the same random numbers and operators: what is left are other
orders of sums (gradients of several microbatches and ranks, kernels that choose their algorithm by alignment).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference of a value by dtype, relative to the largest element of its tensor."""
RELATIVE_HALF = 2e-2
NOISE = {torch.float64: 1e-12, torch.float32: 1e-6}
"""More tolerance by dtype, relative to the largest of what was summed up, or of the gradients of the same block: sums
that would be zero without rounding have a large relative error."""
NOISE_HALF = 2e-3


@dataclass(frozen=True)
class Gap:
    """How much a tensor differs."""

    largest: float
    """Largest difference of an element; infinite for another shape or dtype, or a NaN in only one of both."""
    relative: float
    """The same, relative to the largest element that was expected."""

    def __str__(self) -> str:
        if self.largest == float("inf"):
            return "has other elements, which cannot be subtracted (NaN, an infinity, none, or another shape or dtype)"
        return f"differs by up to {self.largest:.3g} ({self.relative:.3g} of the largest element)"


NO_NUMBER = Gap(float("inf"), float("inf"))


class Differs(Exception):
    """The first difference of a step."""


class Comparisons:
    """Counts what was compared of a step."""

    def __init__(self) -> None:
        self.count = {"values": 0, "gradients": 0, "buffers": 0}

    def add(self, kind: str, what: str, where: str, gap: Gap | None) -> None:
        """Count a comparison. Differs if there is a gap."""
        self.count[kind] += 1
        if gap is not None:
            raise Differs(f"{what} {gap}, in {where}")


@dataclass(frozen=True)
class Measure:
    """The tolerance of a comparison."""

    exact: bool = False
    """Whether values were only moved, so that they are equal to the bit."""
    noise: float = 0.0
    """The largest element of what the value was computed from, or is compared beside."""
    half: bool = False
    """Whether it was computed in half precision, whatever its type."""

    def gap(self, expected: torch.Tensor | None, found: torch.Tensor | None) -> Gap | None:
        """How much two tensors differ; None if they are equal enough."""
        if expected is None or found is None:
            return None if expected is found else NO_NUMBER
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return NO_NUMBER
        if not expected.numel():
            return None
        here, there = _real(expected), _real(found)
        apart = (here - there).abs()
        apart[(here == there) | (here.isnan() & there.isnan())] = 0.0
        largest = float(apart.max())
        if largest == 0.0:
            return None
        scale = largest_element(expected)
        if largest != largest or largest == float("inf"):
            return NO_NUMBER
        if not self.exact and largest <= self._tolerated(expected.dtype, scale):
            return None
        return Gap(largest, largest / scale if scale else float("inf"))

    def _tolerated(self, dtype: torch.dtype, scale: float) -> float:
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        real = dtype.to_real()
        half = self.half or real not in RELATIVE
        relative, noise = (RELATIVE_HALF, NOISE_HALF) if half else (RELATIVE[real], NOISE[real])
        return relative * scale + noise * self.noise


def largest_element(tensor: torch.Tensor | None) -> float:
    """The largest finite absolute value of an element; 0 if there is none."""
    if tensor is None or not tensor.numel():
        return 0.0
    real = _real(tensor).abs()
    return float(real.masked_fill_(~real.isfinite(), 0.0).max())


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in double precision, if it is no integer."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def like(expected: torch.Tensor | None, found: torch.Tensor | None) -> torch.Tensor | None:
    """An expected sum in the type of what was found."""
    return expected if expected is None or found is None else expected.to(found.dtype)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().cpu()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).to(torch.float64, copy=True)
