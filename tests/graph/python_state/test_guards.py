"""The Python state of modules: what is seen of it, without running code of the user's; what code mentions."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from rannd.graph.modules.attribute_reads import UNCALLED, Mentions
from rannd.graph.python_state.guards import changed, kept, outside, state_of


class Settings:
    """An object of attributes."""

    def __init__(self) -> None:
        self.alpha: Any = 1.0
        self.sizes = [1, 2]


class Hostile:
    """Whatever looks at it closely fails."""

    def __init__(self) -> None:
        self.plain = 1

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(self) -> int:
        raise AssertionError("hashed")

    def __repr__(self) -> str:
        raise AssertionError("shown")

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} read")


class Slotted:
    __slots__ = ("alpha", "empty")

    def __init__(self) -> None:
        self.alpha = 1


def test_values_differ_as_python_sees_them() -> None:
    model = nn.Linear(2, 2)
    values = [
        1, 1.0, True, 0, 0.0, -0.0, False, "1", b"1", None, 1 + 0j, np.float64(1), np.float32(1), np.int64(1), (1,),
        [1], [1.0], [True], {1}, {"a": 1}, {"a": True}, {"b": 1}, [[1]], [[1.0]], torch.float32, math.nan,
        torch.tensor(1), np.ones(1), torch.relu, Settings(), frozenset({1}), frozenset({1.0}),
    ]  # fmt: skip
    states = []
    for value in values:
        model.value = value
        states.append(state_of(model))
    for place, one in enumerate(states):
        for other, state in enumerate(states):
            assert (one == state) == (place == other), (values[place], values[other])


def test_equal_values_are_equal() -> None:
    def states(make: Callable[[], Any]) -> tuple[Any, Any]:
        model = nn.Linear(2, 2)
        model.value = make()
        one = state_of(model)
        model.value = make()
        return one, state_of(model)

    makers: list[Callable[[], Any]] = [
        lambda: float("nan"), lambda: np.float64("nan"), lambda: [float("nan"), {"a": (1, 2)}], lambda: {3, 1, 2},
        lambda: 10**30, lambda: [[1.5], [2]], lambda: torch.Size((2, 3)), lambda: np.int32(4),
    ]  # fmt: skip
    for make in makers:
        one, other = states(make)
        assert one == other
        assert not changed(one, other)


def _append(model: Any) -> None:
    model.nested["a"][0].append(3)


def _attribute(model: Any) -> None:
    model.settings.alpha = float("nan")


def _list_of_object(model: Any) -> None:
    model.settings.sizes[0] = 7


def _slot(model: Any) -> None:
    model.slotted.alpha = 2


def _new_slot(model: Any) -> None:
    model.slotted.empty = 2


def _last(model: Any) -> None:
    model.long[-1] = 5


def _grown(model: Any) -> None:
    model.huge.append(5)


def _method(model: Any) -> None:
    model.forward = functools.partial(nn.Linear.forward, model)


def _backward(model: Any) -> None:
    model.register_full_backward_hook(lambda module, inputs, outputs: None)


def _before_backward(model: Any) -> None:
    model.register_full_backward_pre_hook(lambda module, outputs: None)


def _module(model: Any) -> None:
    model.act = nn.Sigmoid()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_append, "nested of the model"),
        (_attribute, "settings.alpha of the model"),
        (_list_of_object, "settings.sizes of the model"),
        (_slot, "slotted.alpha of the model"),
        (_new_slot, "slotted.empty of the model"),
        (_last, "long of the model"),
        (_grown, "huge of the model"),
        (_method, "forward of the model"),
        (_backward, "_backward_hooks of the model"),
        (_before_backward, "_backward_pre_hooks of the model"),
        (_module, "_modules of the model"),
    ],
)
def test_changes_are_named(change: Callable[[nn.Module], None], name: str) -> None:
    model = nn.Linear(2, 2)
    model.nested = {"a": [[1, 2]]}
    model.settings = Settings()
    model.slotted = Slotted()
    model.long = [1] * 200
    model.huge = [1] * 2000
    model.act = nn.Tanh()
    before = state_of(model)
    assert before == state_of(model)
    change(model)
    after = state_of(model)
    assert before != after
    assert name in [str(each) for each in changed(before, after)]
    names = {"alpha", "empty", "nested", "long", "huge", "forward", "sizes"}
    for state in (before, after):
        state.forget(names)
    assert (before == after) == (names & {name.split(" ")[0].split(".")[-1]} != set())


def test_ignored_names_are_ignored_in_objects_too() -> None:
    model = nn.Linear(2, 2)
    model.settings = Settings()
    before = state_of(model, {"alpha", "step"})
    model.settings.alpha = 5
    model.step = 3
    assert before == state_of(model, {"alpha", "step"})


def test_no_code_of_the_users_runs() -> None:
    model = nn.Linear(2, 2)
    model.many, model.named = [Hostile(), Hostile()], {"a": Hostile()}
    model.__dict__["one"] = Hostile()  # nn.Module looks closely
    assert "alpha" not in Mentions(model)
    before = state_of(model)
    assert before == state_of(model)
    vars_of = object.__getattribute__(model.one, "__dict__")
    vars_of["plain"] = 2
    assert [str(each) for each in changed(before, state_of(model))] == ["one.plain of the model"]
    model.many[1] = Hostile()
    assert "many of the model" in [str(each) for each in changed(before, state_of(model))]
    changes: set[str] = set()
    with kept(model, changes):
        vars_of["plain"] = 3
        model.named["b"] = Hostile()
    assert changes == {"one.plain of the model", "named of the model"}
    assert vars_of["plain"] == 2
    assert list(model.named) == ["a"]


def test_what_runs_as_it_is_has_only_its_training_flag() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    before = outside(state_of(model), ["1"])
    model[1][0].scale = 3
    assert before == outside(state_of(model), ["1"])
    model[1][0].eval()
    assert before != outside(state_of(model), ["1"])


def test_what_torch_notes_in_functions_changes_nothing() -> None:
    """When `checkpoint` is first called, for example, which models of Hugging Face have in an attribute."""

    def ordinary(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    model = nn.Linear(2, 2)
    model.function = functools.partial(torch._disable_dynamo(ordinary), x=1)
    before = state_of(model)
    assert "__dynamo_disable" not in vars(ordinary)
    model.function(x=torch.ones(1))
    assert "__dynamo_disable" in vars(ordinary)
    assert before == state_of(model)
    ordinary.own = 1  # type: ignore[attr-defined]
    assert before != state_of(model)


def test_an_id_is_not_used_again_while_it_is_remembered() -> None:
    model = nn.Linear(2, 2)
    states = []
    for _ in range(20):
        model.register_buffer("mask", torch.zeros(1))
        model.table = object()
        model.settings = Settings()
        states.append(state_of(model))
    assert all(one != other for place, one in enumerate(states) for other in states[:place])


def test_what_the_code_changes_is_put_back() -> None:
    model = nn.Linear(2, 2)
    model.counts, model.seen, model.unique = {"n": 0, "deep": [1]}, [1], {1}
    model.settings, model.slotted = Settings(), Slotted()
    model.nothing, model.old = None, 4
    changes: set[str] = set()

    def fail() -> None:
        with kept(model, changes):
            model.counts["n"] += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model.counts == {"n": 0, "deep": [1]}
    with kept(model, changes):
        model.counts["n"] += 1
        model.counts["deep"].append(2)
        model.seen.append(torch.ones(1))
        model.unique.add(5)
        model.settings.alpha = 5
        model.settings.new = 5
        model.slotted.alpha = 6
        model.nothing = {}
        model.more = 1
        del model.old
    assert changes == {
        f"{name} of the model"
        for name in ("counts", "seen", "unique", "settings.alpha", "settings.new", "slotted.alpha", "nothing", "more",
                     "old")
    }  # fmt: skip
    assert model.counts == {"n": 0, "deep": [1]}
    assert (model.seen, model.unique, model.nothing, model.old) == ([1], {1}, None, 4)
    assert vars(model.settings) == {"alpha": 1.0, "sizes": [1, 2]}
    assert model.slotted.alpha == 1
    assert not hasattr(model, "more")


class Reading(nn.Linear):
    """Reads attributes in several ways."""

    SCALES: ClassVar[dict[str, int]] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = [self.in_a_list for _ in range(1)]
        return super().forward(x) * helper(self) * getattr(self, "by_name", 1) * len(inner)


def helper(module: Any) -> Any:
    return module.in_a_helper * DEEP(module)


class _Deep:
    def __call__(self, module: Any) -> Any:
        return module.in_an_object


DEEP = _Deep()


class Dynamic(nn.Linear):
    """Reads attributes whose names it puts together."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * getattr(self, f"scale_{len(x)}")


class Own(Settings):
    def get(self) -> Any:
        return self.by_the_object


def test_mentioned_names() -> None:
    model = nn.Sequential(Reading(2, 2))
    found = Mentions(model)
    for name in ("in_a_list", "in_a_helper", "in_an_object", "by_name", "weight"):
        assert name in found
    for name in ("step", "by_the_object", "by_a_hook"):
        assert name not in found
    model.settings = Own()
    model[0].register_forward_hook(lambda module, inputs, output: output * module.by_a_hook)
    model.told = ["by_a_string"]
    found = Mentions(model)
    for name in ("by_the_object", "by_a_hook", "by_a_string"):
        assert name in found
    assert "step" not in found
    assert "step" in Mentions(Dynamic(2, 2))
    assert "forward" in found  # torch reads it of every module


class Hooked(Reading):
    """Has a method that nothing calls, and says so."""

    _rannd_uncalled = ("hook",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def hook(self) -> Any:
        return self.in_a_hook


class Unlisted(Hooked):
    """Says nothing of its own methods."""

    def hook(self) -> Any:
        return self.in_an_unlisted_hook


def test_what_a_method_reads_that_is_not_called_is_not_mentioned() -> None:
    assert "in_a_hook" not in Mentions(Hooked(2, 2))
    assert "in_a_list" in Mentions(Hooked(2, 2))
    assert UNCALLED in vars(Hooked)
    for name in ("in_a_hook", "in_an_unlisted_hook"):
        assert name in Mentions(Unlisted(2, 2))


def test_names_that_objects_in_objects_read_are_mentioned() -> None:
    """As deep as the guard looks."""
    model = nn.Linear(2, 2)
    for value in ([[[Own()]]], {"a": types.SimpleNamespace(b=[Own()])}, functools.partial(print, [Own().get])):
        model.value = value
        assert "by_the_object" in Mentions(model)
        assert "step" not in Mentions(model)
