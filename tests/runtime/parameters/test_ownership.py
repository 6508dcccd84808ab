"""What several ranks hold alike is saved by all of them together, each tensor once."""

from __future__ import annotations

import torch
from torch import nn

from rannd.runtime.parameters.ownership import divide_writing


def weight(count: int, *, trained: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.empty(count), requires_grad=trained)


def test_replicas_divide_parameters_by_bytes() -> None:
    tensors = {"a": weight(10), "b": weight(80), "c": weight(40), "d": weight(50)}
    assert divide_writing(tensors, dict.fromkeys(tensors, (0, 1)), (0, 1)) == {"b": 0, "d": 1, "c": 1, "a": 0}


def test_each_stage_is_saved_by_its_own_ranks() -> None:
    tensors = {"first": weight(10), "more": weight(10), "last": weight(10)}
    slots = {"first": (0, 2), "more": (0, 2), "last": (1, 3)}
    assert divide_writing(tensors, slots, (3, 2, 1, 0)) == {"first": 1, "more": 3, "last": 0}


def test_what_may_differ_is_the_first_rank_s() -> None:
    """Ranks have means of their own; frozen parameters are the script's to change."""
    tensors = {"mean": torch.empty(10), "frozen": weight(10, trained=False), "weight": weight(30), "bias": weight(5)}
    assert divide_writing(tensors, dict.fromkeys(tensors, (1, 2)), (5, 6, 7)) == {
        "mean": 6,
        "frozen": 6,
        "weight": 7,
        "bias": 6,
    }
