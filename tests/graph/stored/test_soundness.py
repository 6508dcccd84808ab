"""Traces whose parts follow the grammar, but do not fit each other or the call: damage, not errors of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from leaf_models import Masking
from pieces import signature_of
from test_trace_grammar import Model, called, plain_trace, sealed, size
from thinned import one_in
from torch import nn

from rannd.graph.fx.symbolic_values import ROWS
from rannd.graph.stored.codec import decode
from rannd.graph.stored.encoding import Broken
from rannd.graph.stored.soundness import check_inputs

Change = Callable[[dict[str, Any]], Any]
ROWS_SIZE = ["y", ROWS.name]


def number(expression: Any) -> Change:
    return lambda data: data["graph"]["values"].__setitem__(0, ["N", "int", expression])


def leaf(place: int, value: Any) -> Change:
    """Change a part of the first call of a leaf."""
    return lambda data: next(iter(data["leaves"].values())).__setitem__(place, value)


UNSOUND: dict[str, tuple[type[nn.Module], Change]] = {
    "a size that grows beyond 64 bits": (Model, size(["Mul", ROWS_SIZE, 2**62])),
    "a size beyond 64 bits": (Model, size(2**62)),
    "a size that is negative": (Model, size(["Add", 7, ["Mul", -1, ROWS_SIZE]])),
    "a size that cannot be computed": (Model, size(["FloorDiv", 6, ["Add", ROWS_SIZE, -1]])),
    "sizes whose product is beyond 64 bits": (
        Model,
        lambda data: data["graph"]["values"].__setitem__(0, ["T", "float32", *[2**31] * 3]),
    ),
    "a number beyond 64 bits": (Model, number(["Mul", ROWS_SIZE, 2**62])),
    "results that are not returned": (Model, lambda data: data["outputs"].__setitem__(2, [])),
    "a place that is given twice": (Model, lambda data: data["outputs"].__setitem__(1, [[0, 1]])),
    "a leaf without its arguments": (Masking, leaf(5, [])),
    "a leaf's argument that is given twice": (Masking, leaf(5, [[1, 1.0], [1, 2.0]])),
    "a leaf without its tensors": (Masking, leaf(2, ["filling"])),
    "a leaf with tensors that it has not": (Masking, leaf(2, [0, "filling", "other"])),
    "a leaf without its results": (Masking, leaf(6, [])),
    "a leaf's result that is no multiple of the rows": (
        Masking,
        leaf(6, [["float32", [["Pow", ROWS_SIZE, 2], 6], True]]),
    ),
    "a leaf's result of an unknown symbol": (Masking, leaf(6, [["float32", [["y", "u7"], 6], True]])),
    "a leaf that nobody knows": (Masking, called("rannd::leaf", 3, ["t", "other#0", ["l"], ["l"], ["l"]])),
}


@pytest.mark.parametrize("name", one_in(3, UNSOUND))
def test_a_trace_that_fails_later_is_broken(name: str) -> None:
    kind, change = UNSOUND[name]
    model = kind()
    data = plain_trace(model)
    decode(sealed(data), model)
    change(data)
    with pytest.raises(Broken):
        decode(sealed(data), model)


@pytest.mark.parametrize("other", [torch.randn(4, 6, 6), torch.randn(4, 7), torch.randn(4, 6, dtype=torch.float64)])
def test_a_trace_for_other_tensors_is_broken(other: torch.Tensor) -> None:
    model = Model()
    traced, _ = decode(sealed(plain_trace(model)), model)
    check_inputs(traced, signature_of(model, torch.randn(3, 6))[0])
    with pytest.raises(Broken, match="is of the shape"):
        check_inputs(traced, signature_of(model, other)[0])
    with pytest.raises(Broken, match="it is for 1 tensors"):
        check_inputs(traced, signature_of(model, torch.randn(3, 6), torch.randn(3, 6))[0])
