"""Rules of operators that work along given dimensions: reductions, sorts, scans, scatters."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from rannd.graph.rows.rules.elementwise import pointwise
from rannd.graph.rows.rules.operation import Operation, aligned, away, dims_of, everywhere, rule
from rannd.graph.rows.rules.states import Coupled, Reduction, Rows, Scalar, State


@rule("flip", "roll", "cumsum", "cumprod", "softmax", "log_softmax", "_softmax", "_log_softmax",
      "topk", "glu", "gather", "scatter", "scatter_add", "diff", "cummax", "cummin", "logcumsumexp", "index_add",
      "index_copy", "index_fill", "index_select", "scatter_", "scatter_add_", "triu", "tril", "take_along_dim", "cross",
      "kthvalue", "mode", "median", "nanmedian", "scatter_reduce", "scatter_reduce_", "cumsum_", "cumprod_",
      "index_add_", "index_copy_", "index_fill_", "linalg_cross")  # fmt: skip
def along_dims(op: Operation) -> State:
    """Works along given dimensions independently of all others."""
    ndim = len(op.shape(op.args["self"]))
    if op.name in ("triu", "tril"):
        dims = {ndim - 2, ndim - 1}
    else:
        along = op.args.get("dim", op.args.get("dims"))
        if along is None:
            raise Coupled(f"{op.name} works across all elements")
        dims = dims_of(along, ndim)
    others = [value for key, value in op.args.items() if key != "self" and isinstance(value, Node)]
    if op.name.startswith("index_"):
        op.fixed("index")
        others = [value for value in others if value is not op.args.get("index")]
    states = {op.as_rows(value) for value in [op.args["self"], *others]}
    if len(states) != 1 or None in states:
        raise Coupled(f"{op.name} combines different samples")
    rows = away(op, "self", dims)
    if op.name in ("kthvalue", "mode", "median", "nanmedian"):
        keep = op.args.get("keepdim", False)
        rows = Rows(rows.dim - (0 if keep else sum(dim < rows.dim for dim in dims)), rows.outer, rows.inner)
    return everywhere(op, rows)


@rule("sum", "mean", "amax", "amin", "prod", "var", "std", "logsumexp", "norm", "linalg_norm", "linalg_vector_norm",
      "argmax", "argmin", "any", "all", "max", "min", "nansum", "nanmean", "count_nonzero", "var_mean", "std_mean",
      "linalg_matrix_norm", "aminmax")  # fmt: skip
def reduce(op: Operation) -> State:
    """Reduces dimensions; over the batch dimension only sums and means are additive over microbatches."""
    if isinstance(op.args.get("other"), Node):
        return pointwise(op)
    state = op.state(op.args["self"])
    if isinstance(state, Scalar):
        return state if op.name in ("sum", "mean") else Scalar(Reduction.OTHER)
    shape = op.shape(op.args["self"])
    dims = dims_of(op.args.get("dim"), len(shape))
    rows = op.rows("self")
    assert rows is not None
    if rows.dim in dims:
        if op.name in ("sum", "mean", "nansum", "count_nonzero"):
            return Scalar(Reduction.MEAN if op.name == "mean" else Reduction.SUM)
        raise Coupled(f"{op.name} works along the batch dimension")
    keep = op.args.get("keepdim", False)
    return everywhere(op, replace(rows, dim=rows.dim - (0 if keep else sum(dim < rows.dim for dim in dims))))


@rule("quantile", "nanquantile")
def quantile(op: Operation) -> State:
    """Reduces one dimension; a vector of quantiles adds a new dimension 0."""
    op.fixed("q")
    if op.args.get("dim") is None:
        raise Coupled(f"{op.name} works across all elements")
    dim = op.args["dim"] % len(op.shape(op.args["self"]))
    rows = away(op, "self", {dim})
    several = len(op.shape(op.args["q"])) if isinstance(op.args["q"], Node) else 0
    return replace(rows, dim=rows.dim + several - (not op.args.get("keepdim", False) and dim < rows.dim))


@rule("renorm", "renorm_")
def renorm(op: Operation) -> State:
    """Normalizes each slice along `dim` independently."""
    rows = op.rows("self")
    if rows is None or rows.dim != op.args["dim"] % len(op.out):
        raise Coupled(f"{op.name} works along the batch dimension")
    return rows


@rule("cosine_similarity", "pairwise_distance")
def compare(op: Operation) -> State:
    """Compares two broadcast tensors along one dimension."""
    rows = aligned(op, [op.args["x1"], op.args["x2"]])
    keep = op.args.get("keepdim", False)
    ndim = len(op.out) + (not keep)
    dim = op.args.get("dim", -1) % ndim
    place = ndim + rows.dim
    if place == dim:
        raise Coupled(f"{op.name} works along the batch dimension")
    return Rows(place - (not keep and dim < place), rows.outer, rows.inner)
