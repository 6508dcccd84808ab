"""Rules of views, reshapes, permutations and broadcasts."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from rannd.graph.rows.rules.operation import Operation, aligned, away, filled, leaves, relocate, rule
from rannd.graph.rows.rules.states import FIXED, Coupled, RowIndex, Rows, State


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze",
      "ravel", "_reshape_alias", "view_copy", "squeeze_", "unsqueeze_", "atleast_1d", "atleast_2d",
      "atleast_3d")  # fmt: skip
def reshape(op: Operation) -> State:
    """Reshape that keeps the row-major order of the elements."""
    source = op.args["self"]
    state = op.state(source)
    shape = op.shape(source)
    if isinstance(state, RowIndex):
        found = relocate(prod(shape[: state.dim]), prod(shape[state.dim + 1 :]), op.out)
        if (found.outer, found.inner) != (1, 1):
            raise Coupled(f"{op.name} repeats the positions of samples in one dimension")
        return replace(state, dim=found.dim)
    rows = op.rows("self")
    if rows is None:
        raise Coupled(f"{op.name} takes its shape from the samples")
    return relocate(prod(shape[: rows.dim]) * rows.outer, rows.inner * prod(shape[rows.dim + 1 :]), op.out)


def _moved(op: Operation, order: list[int]) -> State:
    """State after a permutation of dimensions; `order[new]` is the old dimension."""
    state = op.state(op.args["self"])
    if isinstance(state, RowIndex):
        return replace(state, dim=order.index(state.dim))
    rows = op.rows("self")
    assert rows is not None
    return Rows(order.index(rows.dim), rows.outer, rows.inner)


@rule("permute")
def permute(op: Operation) -> State:
    ndim = len(op.out)
    return _moved(op, [dim % ndim for dim in op.args["dims"]])


@rule("transpose", "transpose_", "swapaxes", "swapdims")
def transpose(op: Operation) -> State:
    ndim = len(op.out)
    first, second = (value for name, value in op.args.items() if name != "self")
    order = list(range(ndim))
    order[first % ndim], order[second % ndim] = order[second % ndim], order[first % ndim]
    return _moved(op, order)


@rule("t", "mT", "numpy_T", "adjoint", "matrix_H")
def matrix_transpose(op: Operation) -> State:
    ndim = len(op.out)
    order = list(range(ndim))
    if op.name == "numpy_T":
        order.reverse()
    elif ndim >= 2:
        order[-2], order[-1] = order[-1], order[-2]
    return _moved(op, order)


@rule("movedim", "moveaxis")
def movedim(op: Operation) -> State:
    ndim = len(op.out)
    sources = [dim % ndim for dim in leaves(op.args["source"])]
    targets = [dim % ndim for dim in leaves(op.args["destination"])]
    order = [-1] * ndim
    for source, target in zip(sources, targets, strict=True):
        order[target] = source
    rest = iter([dim for dim in range(ndim) if dim not in sources])
    return _moved(op, [dim if dim >= 0 else next(rest) for dim in order])


@rule("expand", "expand_as", "broadcast_to", "expand_copy")
def expand(op: Operation) -> State:
    """Adds dimensions on the left; a fixed dimension of size 1 may be expanded to the number of rows."""
    state = op.state(op.args["self"])
    source, out = op.shape(op.args["self"]), op.out
    if state is FIXED:
        if not (len(op.node.args) > 1 and op.state(op.args.get("other")) is not FIXED) and op.name != "expand":
            raise Coupled(f"{op.name} takes its shape from the samples")
        return filled(out)
    added = len(out) - len(source)
    if isinstance(state, RowIndex):
        return replace(state, dim=state.dim + added)
    rows = op.rows("self")
    assert rows is not None
    return Rows(rows.dim + added, rows.outer, rows.inner)


@rule("broadcast_tensors")
def broadcast_tensors(op: Operation) -> State:
    rows = aligned(op, list(op.args["tensors"]))
    out = op.node.meta["val"]
    return (Rows(out[0].ndim + rows.dim, rows.outer, rows.inner),) * len(out)


@rule("unfold", "unfold_copy")
def unfold(op: Operation) -> State:
    """Windows along one dimension; their elements form a new last dimension."""
    return away(op, "self", {op.args["dimension"] % len(op.shape(op.args["self"]))})


@rule("diagonal", "diagonal_copy")
def diagonal(op: Operation) -> State:
    """Replaces two dimensions by one, the last."""
    ndim = len(op.shape(op.args["self"]))
    dims = {op.args["dim1"] % ndim, op.args["dim2"] % ndim}
    rows = away(op, "self", dims)
    return replace(rows, dim=rows.dim - sum(dim < rows.dim for dim in dims))


@rule("diag_embed")
def diag_embed(op: Operation) -> State:
    """Replaces the last dimension by two; only supported if these are the last ones."""
    ndim = len(op.out)
    if {op.args["dim1"] % ndim, op.args["dim2"] % ndim} != {ndim - 2, ndim - 1}:
        raise Coupled("diag_embed makes dimensions that are not the last")
    return away(op, "self", {ndim - 2})


@rule("view_as_real", "view_as_complex")
def as_complex(op: Operation) -> State:
    """Adds or removes a last dimension of size 2 for real and imaginary part."""
    return away(op, "self", {len(op.shape(op.args["self"])) - 1} if op.name == "view_as_complex" else set())
