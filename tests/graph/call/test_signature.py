"""What a call looks like: its tensors, which of them carry the batch, and which calls run the same graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rannd.errors import UsageError
from rannd.graph.call.signature import Call, Mode, Signature, classify, flatten_call

TRAIN = Mode(training=True, grad=True, autocast="")


def call_of(*args: Any, **kwargs: Any) -> Call:
    return flatten_call(args, kwargs)


def signature_of(call: Call, *others: list[list[int]]) -> Signature:
    return classify(call, TRAIN, [call.shapes(), *others])


def test_tensors_are_named_and_keywords_sorted() -> None:
    a, b, c = (torch.zeros(4, n) for n in (1, 2, 3))
    call = call_of(a, [None, 2], z=b, mask={"inner": [c]}, flag=True)
    assert call.names == ("argument 0", "mask['inner'][0]", "z")
    assert [tensor.shape[1] for tensor in call.tensors] == [1, 3, 2]
    assert [value for _, value in call.constants] == [None, 2, True]


def test_the_state_of_an_lstm_does_not_make_its_layers_the_batch() -> None:
    x, h, c = torch.zeros(8, 5, 3), torch.zeros(2, 8, 4), torch.zeros(2, 8, 4)
    for call in (call_of(x, (h, c)), call_of(x, h0=h, c0=c)):
        assert [spec.batch for spec in signature_of(call).tensors] == [True, False, False]
    rows = torch.zeros(2, 5, 4)  # two batches beside a table
    assert [spec.batch for spec in signature_of(call_of(torch.zeros(8, 3), rows, rows)).tensors] == [False, True, True]


def test_unflatten_gives_the_call_back() -> None:
    a, b = torch.zeros(4), torch.ones(4)
    call = call_of(a, (1, None), z={"b": b}, y="text")
    args, kwargs = signature_of(call).unflatten(["first", "second"])
    assert args == ("first", (1, None))
    assert kwargs == {"y": "text", "z": {"b": "second"}}


def test_order_of_keywords_does_not_matter() -> None:
    a, b = torch.zeros(4), torch.ones(4, 2)
    known = signature_of(call_of(x=a, y=b))
    assert known.matches(call_of(y=b, x=a), TRAIN)


@pytest.mark.parametrize(
    ("shapes", "batch"),
    [
        ([(8, 3), (8,)], [True, True]),
        ([(8, 3), (3, 3), (8, 2)], [True, False, True]),
        ([(8, 3), ()], [True, False]),
        ([(5, 3), (4, 3)], [True, False]),
    ],
)
def test_batch_tensors_share_the_first_dimension(shapes: list[tuple[int, ...]], batch: list[bool]) -> None:
    found = signature_of(call_of(*(torch.zeros(shape) for shape in shapes)))
    assert [spec.batch for spec in found.tensors] == batch
    assert found.tensors[0].shape == shapes[0][1:]


def test_other_ranks_shapes_tell_a_batch_from_a_size() -> None:
    call = call_of(torch.zeros(3, 2), torch.zeros(3, 3), torch.zeros(3))
    assert [spec.batch for spec in signature_of(call).tensors] == [True, True, True]
    found = signature_of(call, [[5, 2], [3, 3], [5]])
    assert [spec.batch for spec in found.tensors] == [True, False, True]
    assert found.tensors[1].shape == (3, 3)


def test_an_empty_mini_batch_has_no_rows() -> None:
    call = call_of(torch.zeros(0, 2), torch.zeros(3, 3))
    found = signature_of(call, [[5, 2], [3, 3]])
    assert [spec.batch for spec in found.tensors] == [True, False]
    assert found.rows(call.tensors) == 0


def test_matches_any_number_of_rows() -> None:
    known = signature_of(call_of(torch.zeros(8, 3), torch.zeros(8), k=2))
    for rows in (0, 1, 5):
        assert known.matches(call_of(torch.zeros(rows, 3), torch.zeros(rows), k=2), TRAIN)


@pytest.mark.parametrize(
    "other",
    [
        call_of(torch.zeros(8, 4), torch.zeros(8), k=2),
        call_of(torch.zeros(8, 3), torch.zeros(7), k=2),
        call_of(torch.zeros(8, 3), torch.zeros(()), k=2),
        call_of(torch.zeros(8, 3, dtype=torch.float64), torch.zeros(8), k=2),
        call_of(torch.zeros(8, 3, requires_grad=True), torch.zeros(8), k=2),
        call_of(torch.zeros(8, 3), torch.zeros(8), k=3),
        call_of(torch.zeros(8, 3), torch.zeros(8), k=2.0),
        call_of(torch.zeros(8, 3), torch.zeros(8), k=None),
        call_of(torch.zeros(8, 3), torch.zeros(8)),
        call_of(torch.zeros(8, 3), [torch.zeros(8)], k=2),
        call_of(torch.zeros(8, 3), 1, k=torch.zeros(8)),
    ],
)
def test_does_not_match_other_calls(other: Call) -> None:
    known = signature_of(call_of(torch.zeros(8, 3), torch.zeros(8), k=2))
    assert not known.matches(other, TRAIN)


@pytest.mark.parametrize("mode", [Mode(False, True, ""), Mode(True, False, ""), Mode(True, True, "cpu:torch.bfloat16")])
def test_does_not_match_other_modes(mode: Mode) -> None:
    call = call_of(torch.zeros(8, 3))
    assert not signature_of(call).matches(call, mode)


def test_the_mode_is_that_of_now() -> None:
    assert Mode.current(True) == TRAIN
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert Mode.current(False) == Mode(False, False, "cpu:torch.bfloat16")


def test_keys_tell_graphs_apart() -> None:
    known = signature_of(call_of(torch.zeros(8, 3), k=2))
    assert known.key() == signature_of(call_of(torch.ones(5, 3), k=2)).key()
    for other in (call_of(torch.zeros(8, 4), k=2), call_of(torch.zeros(8, 3), k=3), call_of(torch.zeros(8, 3), j=2)):
        assert known.key() != signature_of(other).key()


class Thing:
    pass


def test_objects_are_named() -> None:
    with pytest.raises(UsageError, match=r"options\['a'\]\[1\] of the model is a \S*Thing; the model takes tensors"):
        call_of(torch.zeros(3), options={"a": [1, Thing()]})


def test_calls_without_a_batch_are_refused() -> None:
    with pytest.raises(UsageError, match="without any tensor"):
        signature_of(call_of(3, None))
    with pytest.raises(UsageError, match=r"no argument carries the batch.*argument 0: \(\)"):
        signature_of(call_of(torch.zeros(())))


def test_ranks_have_to_make_the_same_call() -> None:
    with pytest.raises(UsageError, match="rank 1 calls the model with 1 tensors, this rank with 2"):
        signature_of(call_of(torch.zeros(3), torch.zeros(3)), [[3]])
