"""Operators that work on the last dimensions (a signal, a plane, a volume): pools, resizing, windows, sampling."""

from __future__ import annotations

from rannd.graph.row_rules.operation import Operation, away, everywhere, rule, together
from rannd.graph.row_states import Coupled, State


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices",
      "max_pool3d_with_indices", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
      "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool1d",
      "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
      "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d",
      "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
      "upsample_trilinear3d")  # fmt: skip
def planes(op: Operation) -> State:
    """Each plane alone, whatever is in front of it: the operator's name says how many dimensions it has."""
    name = "input" if "input" in op.args else "self"
    ndim = len(op.shape(op.args[name]))
    last = next(int(letter) for letter in op.name if letter.isdigit())
    return everywhere(op, away(op, name, set(range(ndim - last, ndim))))


@rule("max_unpool2d", "max_unpool3d", "fractional_max_pool2d", "fractional_max_pool3d")
def pairs_of_planes(op: Operation) -> State:
    """Each plane with that of another tensor: indices, or random numbers for each sample."""
    spatial = next(int(letter) for letter in op.name if letter.isdigit())
    rows = together(op, "self", "indices", "random_samples")
    if rows.dim != 0 or len(op.shape(op.args["self"])) != spatial + 2:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return everywhere(op, rows)


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(op: Operation) -> State:
    """(..., channels, height, width)."""
    ndim = len(op.out)
    return away(op, "self", {ndim - 3, ndim - 2, ndim - 1})


@rule("im2col", "col2im")
def windows(op: Operation) -> State:
    """(samples, channels, height, width) to or from (samples, channels x places of a window, windows)."""
    rows = op.rows("self")
    batched = 4 if op.name == "im2col" else 3
    if rows is None or rows.dim != 0 or len(op.shape(op.args["self"])) != batched:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(op: Operation) -> State:
    """Each sample has a grid of its own."""
    rows = together(op, "input", "grid")
    if rows.dim != 0:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows


@rule("affine_grid_generator")
def affine_grid(op: Operation) -> State:
    """A grid for each matrix in `theta`."""
    return away(op, "theta", {1, 2})
