"""Objects are read without their own code; what cannot be read is said to be hidden."""

from __future__ import annotations

import argparse
import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rannd.graph.fingerprint.object_reader import Sort, attributes_of, form_of, modules_of, walk


class Meta(type):
    """Whoever compares or hashes a class of it fails."""

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(cls) -> int:
        raise AssertionError("hashed")


class Hostile(metaclass=Meta):
    def __init__(self) -> None:
        object.__setattr__(self, "plain", 1)

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(name)

    def __iter__(self) -> Any:
        raise AssertionError("iterated")


class HostileList(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("iterated")

    def __len__(self) -> int:
        raise AssertionError("measured")


class Covered:
    """Its attributes cannot be read: a property is in their place."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("run")


class CoveredBelow(argparse.Namespace):
    """A property is in the place of attributes that the class above has."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise AssertionError("run")


def test_attributes_are_read_without_code() -> None:
    assert attributes_of(Hostile()) == {"plain": 1}
    assert form_of(Hostile).named(Hostile()) == [("plain", 1)]
    assert form_of(HostileList).copy(HostileList([1, 2])) == [1, 2]
    assert form_of(Covered).hidden
    assert not form_of(Hostile).hidden
    assert dict(form_of(CoveredBelow).named(CoveredBelow(a=1))) == {"a": 1}


SORTS: list[tuple[Callable[[], Any], Sort]] = [
    (lambda: b"a", Sort.SCALAR), (lambda: np.float64(1), Sort.SCALAR), (lambda: bytearray(b"a"), Sort.SCALAR),
    (lambda: torch.ones(1), Sort.TENSOR), (lambda: nn.Parameter(torch.ones(1)), Sort.TENSOR),
    (lambda: nn.UninitializedParameter(), Sort.ALONE), (lambda: np.ones(1), Sort.ARRAY),
    (torch.Generator, Sort.GENERATOR), (np.random.default_rng, Sort.GENERATOR), (nn.ReLU, Sort.MODULE),
    (lambda: nn.ReLU, Sort.CLASS), (lambda: Hostile, Sort.CLASS), (lambda: form_of, Sort.FUNCTION),
    (lambda: functools.partial(print), Sort.PARTS), (lambda: nn.ReLU().forward, Sort.PARTS), (lambda: [1], Sort.OBJECT),
    (lambda: types.SimpleNamespace(a=1), Sort.OBJECT), (argparse.Namespace, Sort.OBJECT), (Hostile, Sort.OBJECT),
    (lambda: types, Sort.ALONE), (lambda: iter([1]), Sort.ALONE), (object, Sort.ALONE),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SORTS)))
def test_sorts(number: int) -> None:
    make, sort = SORTS[number]
    assert form_of(type(make())).sort is sort


def test_a_walk_meets_everything_once_and_says_where() -> None:
    shared = [torch.zeros(1)]
    inner = nn.Sequential(nn.ReLU())
    inner[0].scale = torch.zeros(3)
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].named = {"a": shared, "b": shared, 3: types.SimpleNamespace(c=torch.zeros(2))}
    model.itself = [model]
    model.hidden = [inner]
    model.after = collections.deque([functools.partial(max, shared)])
    model.register_forward_hook(functools.partial(print, torch.zeros(4)))
    held = list(walk(modules_of(model)))
    tensors = {each.path: tuple(each.value.shape) for each in held if each.form.sort is Sort.TENSOR}
    assert tensors == {
        "0.named['a'][0]": (1,), "0.named[3].c": (2,), "hidden[0].0.scale": (3,), "_forward_hooks[0].args[0]": (4,),
    }  # fmt: skip
    assert len({id(each.value) for each in held if each.form.sort is not Sort.SCALAR}) == len(held)
    assert not any(each.value is model for each in held)
