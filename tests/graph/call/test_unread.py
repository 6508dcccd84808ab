"""A stand-in of an argument notes whatever needs its value."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rannd.graph.call.plain_arguments import PlainArguments
from rannd.graph.call.signature import Mode, Signature, classify, flatten_call
from rannd.graph.call.unread import ArgumentRead, Unread, UnreadArgument, noted_reads


def stand_in(kind: type = str) -> Any:
    return UnreadArgument(Unread("ids", kind, plain=True))


@pytest.mark.parametrize(
    "read",
    [
        str, repr, len, list, bool, hash, int, float, iter, next, dir, json.dumps, copy.copy, copy.deepcopy, os.fspath,
        lambda x: f"{x}", lambda x: f"{x:>3}", lambda x: x == "a", lambda x: x in ("b", "a"), lambda x: x != 1,
        lambda x: x + "a", lambda x: "a" + x, lambda x: 2 * x, lambda x: x < 1, lambda x: x[0], lambda x: "a" in x,
        lambda x: x in {"a"}, lambda x: x in ["a"], lambda x: {x: 1}, lambda x: x.startswith("a"), lambda x: x(),
        lambda x: "{}".format(*[x]), lambda x: "".join([x]), lambda x: "".join(x), lambda x: torch.tensor(x),
        lambda x: torch.ones(2) * x, lambda x: torch.zeros(2).view(x), lambda x: [*x], lambda x: setattr(x, "a", 1),
        lambda x: range(3)[x], lambda x: isinstance(x, str) and x.lower(), lambda x: 1 if x else 2, lambda x: -x,
    ],
)  # fmt: skip
def test_reading_is_noted_or_an_error(read: Callable[[Any], Any]) -> None:
    with noted_reads() as read_names:
        told = ""
        try:
            read(stand_in())
        except (ArgumentRead, TypeError, ValueError, RuntimeError) as exc:
            told = str(exc)
    assert read_names == {"ids"} or UnreadArgument.__name__ in told


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x is None, lambda x: x is not None, lambda x: isinstance(x, torch.Tensor), lambda x: [x, {"a": x}],
        lambda x: isinstance(x, (int, torch.Tensor)), lambda x: (lambda **kwargs: kwargs)(ids=x),
    ],
)  # fmt: skip
def test_passing_on_is_not_reading(look: Callable[[Any], Any]) -> None:
    with noted_reads() as read:
        look(stand_in())
    assert not read


def test_its_class_is_the_arguments() -> None:
    assert isinstance(stand_in(list), list)
    assert not isinstance(stand_in(list), str)


def signature(plain: PlainArguments, **kwargs: Any) -> Signature:
    call = flatten_call((), kwargs, plain)
    return classify(call, Mode(True, True, ""), [call.shapes()])


def test_calls_with_other_names_and_objects_are_the_same_call() -> None:
    plain = PlainArguments()
    one = signature(plain, x=torch.ones(2, 3), ids=["a", "b"], n=[7, 8], meta={"file": object()})
    mode = Mode(True, True, "")
    assert one.matches(flatten_call((), {"x": torch.ones(3, 3), "ids": list("abc"), "n": [1, 2, 3],
                                         "meta": {"file": object(), "more": object()}}, plain), mode)  # fmt: skip
    other = flatten_call((), {"x": torch.ones(3, 3), "ids": None, "n": [1, 2, 3], "meta": {}}, plain)
    assert not one.matches(other, mode)


def test_what_is_read_is_part_of_the_call_item_by_item() -> None:
    plain = PlainArguments(read={"meta"})
    batch = {"x": torch.ones(2, 3), "meta": {"file": "a.png", "scale": 2.0, "size": (4, 4, 4)}, "flag": True}
    call = flatten_call((), batch, plain)
    assert [each.name for each in call.unread] == ["meta['file']"]
    assert {value for _, value in call.constants if type(value) is not Unread} == {True, 2.0, 4}


def test_numbers_become_tensors_and_come_back() -> None:
    plain = PlainArguments(inputs={"scale", "count"})
    found = signature(plain, x=torch.ones(2, 3), scale=0.1, count=3)
    call = flatten_call((), {"x": torch.ones(2, 3), "scale": 0.3, "count": 2**40 + 1}, plain)
    assert found.matches(call, found.mode)
    assert [spec.name for spec in found.tensors] == ["count", "scale", "x"]
    assert found.unflatten(call.tensors)[1] | {"x": 0} == {"x": 0, "scale": 0.3, "count": 2**40 + 1}
    assert flatten_call((), {"x": torch.ones(2, 3), "scale": 2**70, "count": True}, plain).numbers == ()
