"""The key of a trace and the guard of a call see the same: whatever changes the one, changes the other.

Exceptions are those of `ONE_SIDED`, each of which is shown here. What the guard sees is put back after tracing.
"""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable
from typing import Any, ClassVar

import live_changes
import numpy as np
import pytest
import torch
from live_changes import MODULES, PROCESS, SWITCHED, VALUES, Net, Settings
from mutants import EDITS, MODES, Recipe, in_mode, random_recipe, random_value, realised
from torch import nn
from user_code import answer

from rannd.graph.call.signature import Mode
from rannd.graph.fingerprint.fingerprint import Fingerprint
from rannd.graph.fingerprint.state_rules import (
    GUARD_ITEMS,
    GUARD_LEVELS,
    GUARD_PLAIN_ITEMS,
    HOOK_FLAGS,
    MODULE_PARTS,
    ONE_SIDED,
    ModulePart,
    switches,
)
from rannd.graph.python_state.guards import changed, kept, state_of

KEY, GUARD = "key", "guard"


def seen_by(model: nn.Module, change: Callable[[Any], Any], *args: Any) -> set[str]:
    """Who sees what `change` does to the model; its answer undoes it, if it is a function."""
    before, state, mode = answer(model, *args), state_of(model), Mode.current(model.training)
    assert isinstance(before, Fingerprint), before
    assert state == state_of(model)
    assert not changed(state, state_of(model))
    undo = change(model)
    try:
        after, found = answer(model, *args), state_of(model)
        by_guard = found != state or Mode.current(model.training) != mode
        assert bool(changed(state, found)) == (found != state)
    finally:
        if isinstance(undo, (types.FunctionType, types.MethodType)):
            undo()
    return ({KEY} if after != before else set()) | ({GUARD} if by_guard else set())


def done(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """A change that nobody undoes, whatever it answers."""

    def act(model: Any) -> None:
        change(model)

    return act


def test_the_table_has_every_attribute_of_every_module() -> None:
    """A version of torch that gives modules another one is found here."""
    assert MODULE_PARTS.keys() == nn.Module().__dict__.keys()
    assert HOOK_FLAGS.keys() == {name for name, part in MODULE_PARTS.items() if part is ModulePart.HOOKS}
    flags = {flag for each in HOOK_FLAGS.values() for flag in each}
    assert flags == {name for name, part in MODULE_PARTS.items() if part is ModulePart.FLAGS}


@pytest.mark.parametrize("name", VALUES)
def test_what_an_attribute_holds(name: str) -> None:
    make, change = VALUES[name]
    assert seen_by(Net(make()), done(lambda model: change(model.value))) == {KEY, GUARD}


@pytest.mark.parametrize("name", MODULES)
def test_what_modules_are(name: str) -> None:
    assert seen_by(Net(), done(MODULES[name])) == {KEY, GUARD}


@pytest.mark.parametrize("name", PROCESS)
def test_what_is_around_the_model(name: str) -> None:
    assert seen_by(Net(), PROCESS[name]) == {KEY, GUARD}


def _values() -> dict[tuple[str, int], Any]:
    """(name of a switch, place in it) -> what it is now."""
    return {
        (name, place): each
        for name, value in switches().items()
        for place, each in enumerate(value if isinstance(value, list) else [value])
    }


def test_every_switch_has_a_case_that_changes_it_alone() -> None:
    """And each value of a switch that has several."""
    before, changes = _values(), {}
    for name, change in SWITCHED.items():
        undo = change(None)
        try:
            after = _values()
        finally:
            undo()
        assert _values() == before, name
        changes[name] = [place for place in before if after[place] != before[place]]
    assert {name: len(places) for name, places in changes.items()} == dict.fromkeys(SWITCHED, 1)
    assert {name: places[0][0] for name, places in changes.items()} == {
        name: name.partition(",")[0] for name in SWITCHED
    }
    assert {places[0] for places in changes.values()} == before.keys()


def plain_recipe() -> Recipe:
    recipe = random_recipe(random.Random(3))
    recipe.edits, recipe.call = {}, "plain"
    recipe.slots["bias"], recipe.slots["norm"], recipe.sizes["layers"] = "True", "LayerNorm", 2
    return recipe


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, names in EDITS.items() for name in names])
def test_mutants(group: str, name: str) -> None:
    """The changes that the key is tested with."""
    with realised(plain_recipe()) as (model, args, _):
        assert seen_by(model, done(EDITS[group][name]), *args) == {KEY, GUARD}


@pytest.mark.parametrize("mode", [each for each in MODES if each != "plain"])
def test_modes_of_mutants(mode: str) -> None:
    with realised(plain_recipe()) as (model, args, _):
        key, state, way = answer(model, *args), state_of(model), Mode.current(model.training)
        with in_mode(mode):
            assert answer(model, *args) != key
            assert state_of(model) != state or Mode.current(model.training) != way


def changed_in_place(generator: random.Random, value: Any) -> bool:
    """Change one thing somewhere inside; whether there was something to change."""
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    inner = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, (list, tuple)) else []
    if generator.random() < 0.7:
        generator.shuffle(inner)
        if any(changed_in_place(generator, each) for each in inner):
            return True
    if isinstance(value, list):
        value.append(generator.choice((0, 1.0, True, "a", None, b"a")))
    elif isinstance(value, dict):
        value[f"k{generator.randrange(9)}"] = generator.choice((1, 1.0, True, "a"))
    elif isinstance(value, set):
        value.add(f"k{generator.randrange(9)}")
    else:
        return False
    return True


@pytest.mark.long
def test_mutants_in_place() -> None:
    """Nested containers and objects in which one thing changes; nothing is replaced."""
    generator = random.Random(0)
    met = 0
    for _ in range(400):
        model = Net([random_value(generator, GUARD_LEVELS - 2) for _ in range(3)])

        def change(each: Any) -> None:
            nonlocal met
            met += changed_in_place(generator, each.value)

        found = seen_by(model, change)
        assert found in ({KEY, GUARD}, set())
        met -= not found
    assert met > 300


UNDONE_LATE = {
    "default factory", "class of an object", "other defaults", "code of a function", "gradients of a tensor",
    "size of a tensor", "type of a tensor", "parameter of a hidden module",
}  # fmt: skip
"""What is not put back: code that does it in every call is traced in every call; done once, it costs one more trace."""


@pytest.mark.parametrize("name", [name for name in VALUES if name not in UNDONE_LATE])
def test_what_the_guard_sees_is_put_back(name: str) -> None:
    """Otherwise what the model's code does while it is traced would make every call another one."""
    make, change = VALUES[name]
    model = Net(make())
    before, changes = state_of(model), set[str]()
    with kept(model, changes):
        change(model.value)
        assert state_of(model) != before
    assert state_of(model) == before
    assert any(each.startswith("value") for each in changes)


@pytest.mark.parametrize("name", ["object that is a hook", "closure of a hook"])
def test_what_hooks_do_is_put_back(name: str) -> None:
    model = Net()
    before = state_of(model)
    with kept(model, set()):
        MODULES[name](model)
        assert state_of(model) != before
    assert state_of(model) == before


def test_hooks_are_the_same_when_they_are_registered_again() -> None:
    """Their keys are numbers that grow."""

    def again(model: Any) -> None:
        hooks = list(model.last._forward_hooks.values())
        model.last._forward_hooks.clear()
        for each in hooks:
            model.last.register_forward_hook(each)

    assert seen_by(Net(), again) == set()


# -- one-sided -------------------------------------------------------------------------------------------------------


class Counted(Net):
    rate: ClassVar[Any] = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.rate * live_changes.RATE


def _strides(model: Any) -> None:
    weight = model.first.weight
    weight.data = weight.data.t().contiguous().t()


def _shared(model: Any) -> None:
    model.first.weight.data = model.last.weight.data


def _written(model: Any) -> None:
    model.value.add_(1)


def _another(model: Any) -> None:
    model.value = Settings()


def _class_attribute(model: Any) -> Callable[[], None]:
    Counted.rate = 2.0
    return lambda: setattr(Counted, "rate", 1.0)


def _global(model: Any) -> Callable[[], None]:
    live_changes.RATE = 2.0
    return lambda: setattr(live_changes, "RATE", 1.0)


def _bases(model: Any) -> Callable[[], None]:
    before = Counted.forward
    setattr(Counted, "forward", lambda self, x: x)  # noqa: B010
    return lambda: setattr(Counted, "forward", before)


def _order(model: Any) -> None:
    model.value.alpha = model.value.__dict__.pop("alpha")


def nested(levels: int) -> Any:
    return Settings(inner=nested(levels - 1)) if levels else Settings()


def _deep(model: Any) -> None:
    value = model.value
    while value.inner is not None:
        value = value.inner
    value.alpha = 2.0


def _machinery(model: Any) -> None:
    model.value[0].param_groups[0]["lr"] = 1.0


def _no_hook(*args: Any) -> None:
    return None


ONE_SIDED_CHANGES: dict[str, list[tuple[Callable[[], Any], Callable[[Any], Any], set[str]]]] = {
    "device and strides of a tensor": [(lambda: None, _strides, {KEY})],
    "memory that tensors share": [(lambda: None, _shared, {KEY})],
    "values of a tensor in an attribute": [(lambda: torch.ones(2), _written, {KEY})],
    "identity of an object": [(Settings, _another, {GUARD})],
    "bytecode, annotations and bases of classes": [(lambda: None, _bases, {KEY})],
    "globals, attributes of classes": [(lambda: None, _global, {KEY}), (lambda: None, _class_attribute, {KEY})],
    "order of attributes": [(Settings, _order, {KEY})],
    "values beyond the limits": [
        (lambda: nested(GUARD_LEVELS), _deep, {KEY}),
        (lambda: [1] * (GUARD_PLAIN_ITEMS + 1), lambda model: model.value.__setitem__(-1, 2), {KEY}),
        (lambda: [1, 1.0] * GUARD_ITEMS[0], lambda model: model.value.__setitem__(-1, 2.0), {KEY}),
        (lambda: np.ones(2**17, np.uint8), lambda model: model.value.__setitem__(0, 2), {KEY}),
    ],
}


@pytest.mark.parametrize("name", ONE_SIDED_CHANGES)
def test_one_side_sees_it(name: str) -> None:
    """The list is true: what only one of them sees is what it says, and no more."""
    assert ONE_SIDED[name].startswith(("key", "guard"))
    for make, change, wanted in ONE_SIDED_CHANGES[name]:
        assert seen_by(Counted(make()), change) == wanted


def test_nobody_follows_machinery() -> None:
    """The optimizer in a list: its learning rate is not what the model computes, and changes in every step."""
    model = Net()
    model.value = [torch.optim.SGD(model.parameters(), lr=0.1)]
    state = state_of(model)
    _machinery(model)
    assert state == state_of(model)


def test_every_exception_is_shown() -> None:
    """`ONE_SIDED` has no line that is tested nowhere."""
    elsewhere = {
        "what no object shows",  # test_value_writer
        "objects of torch's and Python's machinery inside other objects",  # above
        "what hooks of all modules hold",  # a hook that changes what it holds
    }
    assert ONE_SIDED.keys() == ONE_SIDED_CHANGES.keys() | elsewhere
    scales = [1.0]
    undo = torch.nn.modules.module.register_module_forward_hook(functools.partial(_no_hook, scales))
    try:
        assert seen_by(Net(), lambda model: scales.append(2.0)) == {KEY}
    finally:
        undo.remove()
