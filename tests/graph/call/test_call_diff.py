"""In what calls differ, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rannd.graph.call.call_diff import difference, of_call, of_signature
from rannd.graph.call.signature import Mode, classify, flatten_call

MODE = Mode(True, True, "")
X = torch.randn(4, 8)


def told(*args: Any, mode: Mode = MODE, **kwargs: Any) -> dict[str, str]:
    return of_call(flatten_call(args, kwargs), mode)


def test_equal_calls_do_not_differ_whatever_their_rows() -> None:
    assert difference([told(X, {"a": X}), told(X[:2], {"a": X[:2]}), told(X[:0], {"a": X})]) == ""


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (told(X, mask=X), told(X), "rank 1 does not pass mask, rank 0 passes a tensor of float32 with 2 dimensions"),
        (told(X), told(X.int()), "rank 1 passes a tensor of int32 with 2 dimensions as argument 0, rank 0 a tensor of"),
        (told(X, n=1), told(X, n=True), "rank 1 passes bool True as n, rank 0 int 1"),
        (told(X, n="a"), told(X, n=None), "rank 1 passes NoneType None as n, rank 0 str 'a'"),
        (told(X), told(X[0]), "with 1 dimensions as argument 0, rank 0 a tensor of float32 with 2 dimensions"),
        (told(X), told(X.clone().requires_grad_()), "2 dimensions that needs a gradient as argument 0"),
        (told({"a": X, "b": X}), told({"a": X}), "rank 1 does not pass argument 0['b'], rank 0 passes a tensor"),
        (told([X]), told((X,)), "the structure of the arguments"),
        (told(X), told(X, mode=Mode(False, False, "")), "rank 1 calls the model in evaluation without gradients"),
        (told(X), told(X, mode=Mode(True, True, "cpu:torch.bfloat16")), "under autocast cpu:torch.bfloat16"),
    ],
)
def test_what_differs_is_named(one: dict[str, str], other: dict[str, str], text: str) -> None:
    assert text in difference([one, other])


def test_the_rank_that_differs_from_most_is_named() -> None:
    assert difference([told(X, n=1), told(X), told(X)]) == "rank 0 passes n (int 1), rank 1 does not"


def test_many_differences_are_cut() -> None:
    names = {f"a{number}": X for number in range(20)}
    text = difference([told(X, **names), told(X)])
    assert text.count("rank 1") == 8
    assert text.endswith("and 12 more")


def test_known_signatures_show_their_shapes() -> None:
    signatures = [
        classify(call, MODE, [call.shapes()])
        for call in (flatten_call((X,), {"n": 2}), flatten_call((X[:, :6],), {"n": 2}))
    ]
    text = difference([of_signature(signature) for signature in signatures])
    assert text == "rank 1 passes a tensor float32(B, 6) as argument 0, rank 0 a tensor float32(B, 8)"
