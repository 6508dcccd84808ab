"""Rules of sums of products: linear, matmul, einsum, attention."""

from __future__ import annotations

from typing import Any

from rannd.graph.rows.rules.operation import Operation, aligned, away, rule, together
from rannd.graph.rows.rules.states import FIXED, Coupled, Reduction, Rows, Scalar, State


@rule("linear")
def linear(op: Operation) -> State:
    op.fixed("weight", "bias")
    return away(op, "input", {len(op.shape(op.args["input"])) - 1})


def _product(op: Operation, left: Any, right: Any) -> Rows:
    """State of a matrix product with broadcast leading dimensions; dimensions are counted from the right."""
    a, b = op.as_rows(left), op.as_rows(right)
    places = set()
    if a is not None:
        ndim = len(op.shape(left))
        place = ndim - a.dim
        if ndim == 1 or place == 1:
            raise Coupled(f"{op.name} sums over the samples")
        if place == 2 and b is not None:
            raise Coupled(f"{op.name} multiplies all samples with each other")
        right_ndim = len(op.shape(right))
        if place == 2 and right_ndim == 1:
            place = 1
        places.add((place, a.outer, a.inner))
    if b is not None:
        ndim = len(op.shape(right))
        place = ndim - b.dim
        if ndim == 1 or place == 2:
            raise Coupled(f"{op.name} sums over the samples")
        if place == 1 and a is not None:
            raise Coupled(f"{op.name} multiplies all samples with each other")
        if len(op.shape(left)) == 1 and place >= 3:
            place -= 1
        places.add((place, b.outer, b.inner))
    if len(places) != 1:
        raise Coupled(f"{op.name} combines different samples")
    ((place, outer, inner),) = places
    if len(op.shape(right)) == 1 and a is not None and len(op.shape(left)) - a.dim > 2:
        place -= 1
    for value, state in ((left, a), (right, b)):
        shape = op.shape(value)
        if state is None and place > 2 and len(shape) >= place and shape[-place] != 1:
            raise Coupled(f"{op.name} combines samples with a fixed tensor of the batch size")
    return Rows(len(op.out) - place, outer, inner)


@rule("matmul", "mm", "bmm", "__matmul__", "mv")
def matmul(op: Operation) -> State:
    left, right = list(op.args.values())[:2]
    if len(op.shape(left)) == len(op.shape(right)) == 1:
        return inner(op)
    return _product(op, left, right)


@rule("addmm", "baddbmm", "addmv")
def addmm(op: Operation) -> State:
    _, left, right = list(op.args.values())[:3]
    rows = _product(op, left, right)
    added = op.as_rows(op.args["self"])
    shape = op.shape(op.args["self"])
    place = len(op.out) - rows.dim
    if added is None:
        if len(shape) >= place and shape[-place] != 1:
            raise Coupled(f"{op.name} adds a fixed tensor of the size of the batch")
    elif (len(shape) - added.dim, added.outer, added.inner) != (place, rows.outer, rows.inner):
        raise Coupled(f"{op.name} combines different samples")
    return rows


def _sum_of_products(op: Operation, inputs: list[tuple[str, Any]], result: str) -> State:
    """State of an einsum: one letter per dimension; letters missing from the result are summed over."""
    found = set()
    for letters, tensor in inputs:
        rows = op.as_rows(tensor)
        if rows is not None:
            found.add((letters[rows.dim], rows.outer, rows.inner))
    if len(found) != 1:
        raise Coupled(f"{op.name} combines different samples")
    ((letter, outer, inner),) = found
    for letters, tensor in inputs:
        if op.state(tensor) is FIXED and any(
            own == letter and size != 1 for own, size in zip(letters, op.shape(tensor), strict=True)
        ):
            raise Coupled(f"{op.name} combines samples with a fixed tensor of the batch size")
    if letter not in result:
        return Scalar(Reduction.SUM)
    return Rows(result.index(letter), outer, inner)


_ELLIPSIS = "0123456789"
"""Letters for the dimensions of an ellipsis, last dimension first."""


@rule("einsum")
def einsum(op: Operation) -> State:
    given, arrow, result = op.args["equation"].replace(" ", "").partition("->")
    inputs = []
    widest = ""
    for letters, tensor in zip(given.split(","), op.args["tensors"], strict=True):
        hidden = len(op.shape(tensor)) - len(letters.replace("...", ""))
        if "..." in letters:
            if hidden > len(_ELLIPSIS):
                raise Coupled("einsum has too many dimensions")
            behind = _ELLIPSIS[:hidden][::-1]
            widest = max(widest, behind, key=len)
            letters = letters.replace("...", behind)
        inputs.append((letters, tensor))
    if arrow:
        result = result.replace("...", widest)
    else:  # implicit output: letters that occur once, in alphabetical order
        every = given.replace("...", "").replace(",", "")
        result = widest + "".join(sorted(letter for letter in set(every) if every.count(letter) == 1))
    return _sum_of_products(op, inputs, result)


_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@rule("tensordot")
def tensordot(op: Operation) -> State:
    left, right = op.args["self"], op.args["other"]
    first = list(_LETTERS[: len(op.shape(left))])
    second = list(_LETTERS[::-1][: len(op.shape(right))])
    kept = [*first, *second]
    for one, other in zip(op.args["dims_self"], op.args["dims_other"], strict=True):
        kept.remove(first[one])
        kept.remove(second[other])
        second[other] = first[one]
    return _sum_of_products(op, [("".join(first), left), ("".join(second), right)], "".join(kept))


@rule("outer", "ger")
def outer(op: Operation) -> State:
    return _sum_of_products(op, [("a", op.args["self"]), ("b", op.args["vec2"])], "ab")


@rule("dot", "vdot", "inner")
def inner(op: Operation) -> State:
    """Dot product of two vectors; batched `inner` is not supported."""
    left, right = list(op.args.values())[:2]
    if len(op.shape(left)) != 1 or len(op.shape(right)) != 1:
        raise Coupled(f"{op.name} of batches of vectors is not supported")
    return _sum_of_products(op, [("a", left), ("a", right)], "")


@rule("cdist")
def cdist(op: Operation) -> State:
    """(..., n, width) and (..., m, width) to (..., n, m)."""
    places = set()
    for name, other, kept in (("x1", "x2", 2), ("x2", "x1", 1)):
        rows = op.rows(name)
        if rows is None:
            continue
        place = len(op.shape(op.args[name])) - rows.dim
        if place == 1 or (place == 2 and op.rows(other) is not None):
            raise Coupled("cdist compares all samples with each other")
        shape = op.shape(op.args[other])
        if place > 2 and op.rows(other) is None and len(shape) >= place and shape[-place] != 1:
            raise Coupled("cdist combines samples with a fixed tensor of the batch size")
        places.add((kept if place == 2 else place, rows.outer, rows.inner))
    if len(places) != 1:
        raise Coupled("cdist combines different samples")
    ((place, outer, inner),) = places
    return Rows(len(op.out) - place, outer, inner)


@rule("bilinear")
def bilinear(op: Operation) -> State:
    op.fixed("weight", "bias")
    rows = together(op, "input1", "input2")
    if rows.dim == len(op.out) - 1:
        raise Coupled("bilinear sums over the samples")
    return rows


@rule("scaled_dot_product_attention")
def attention(op: Operation) -> State:
    values = [op.args[name] for name in ("query", "key", "value")]
    mask = op.args.get("attn_mask")
    rows = aligned(op, values if mask is None else [*values, mask])
    if -rows.dim <= 2:
        raise Coupled("attention works along the batch dimension")
    return Rows(len(op.out) + rows.dim, rows.outer, rows.inner)
