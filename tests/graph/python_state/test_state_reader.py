"""Reading a model's Python state again: what has changed is seen, and what has not costs little."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rannd.graph.python_state.guards import PythonState, changed, state_of
from rannd.graph.python_state.snapshot import SnapshotWriter
from rannd.graph.python_state.state_reader import REST, StateReader


class Settings:
    def __init__(self) -> None:
        self.alpha = 1.0
        self.sizes = [1, 2]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.width = 1000
        self.sizes = (1, 2)
        self.nested = {"a": [[1, 2]]}
        self.settings = Settings()
        self.plain = torch.ones(3)
        self.last = "last"


class Marked(nn.Parameter):
    """A subclass."""


def _model() -> Any:
    return nn.Sequential(Block(), nn.Dropout(0.1), Block(), nn.GRU(2, 2), nn.Linear(2, 2))


def _renamed(model: Any) -> None:
    model[0].end = model[0].__dict__.pop("last")


def _moved(model: Any) -> None:
    model[4].__dict__ = {**model[4].__dict__, "last": model[2].__dict__.pop("last")}


def _renamed_in_a_plain_module(model: Any) -> None:
    model[1].outplace = model[1].__dict__.pop("inplace")


def _moved_to_the_next(model: Any) -> None:
    """The last attribute of a module becomes the first one of the module that is read after it."""
    before, after = model[3].__dict__, model[4].__dict__
    key, value = before.popitem()
    others = list(after.items())
    after.clear()
    after[key] = value
    after.update(others)


def _replaced_dict(model: Any) -> None:
    model[1].__dict__ = {**model[1].__dict__, "p": 0.2}


def _ordered(model: Any) -> None:
    model[4]._parameters = OrderedDict(model[4]._parameters)


def _data(model: Any) -> None:
    model[0].inner.weight.data = torch.ones(3, 2)


def _dtype(model: Any) -> None:
    model[4].weight.data = model[4].weight.data.double()


def _kind(model: Any) -> None:
    model[4].weight.__class__ = Marked


CHANGES: dict[str, Callable[[Any], object]] = {
    "evaluation": lambda model: model.eval(),
    "one module in evaluation": lambda model: model[2].norm.eval(),
    "number": lambda model: setattr(model[0], "width", 1001),
    "number of another type": lambda model: setattr(model[1], "p", 1),
    "tuple": lambda model: setattr(model[0], "sizes", (1, 3)),
    "new attribute": lambda model: setattr(model[1], "more", 1),
    "attribute gone": lambda model: delattr(model[0], "last"),
    "attribute renamed": _renamed,
    "attribute renamed in a plain module": _renamed_in_a_plain_module,
    "attribute in another module": _moved,
    "attribute in the next module": _moved_to_the_next,
    "other attributes": _replaced_dict,
    "inside a list": lambda model: model[2].nested["a"][0].append(3),
    "inside an object": lambda model: setattr(model[2].settings, "alpha", 2.0),
    "list of an object": lambda model: model[0].settings.sizes.append(3),
    "plain tensor": lambda model: setattr(model[0], "plain", torch.ones(3)),
    "plain tensor's gradient": lambda model: model[0].plain.requires_grad_(),
    "frozen": lambda model: model[4].weight.requires_grad_(False),
    "shape": _data,
    "dtype": _dtype,
    "parameter": lambda model: setattr(model[0].inner, "weight", nn.Parameter(torch.ones(2, 2))),
    "parameter where none was": lambda model: setattr(model[0].inner, "bias", nn.Parameter(torch.ones(2))),
    "parameter gone": lambda model: model[4].register_parameter("bias", None),
    "attribute of a parameter": lambda model: setattr(model[4].weight, "tag", 1),
    "buffer": lambda model: setattr(model[2], "table", torch.ones(2)),
    "new buffer": lambda model: model[1].register_buffer("table", torch.ones(2)),
    "buffer that is saved": lambda model: model[0]._non_persistent_buffers_set.clear(),
    "buffer that is not": lambda model: model[0].norm._non_persistent_buffers_set.add("running_mean"),
    "submodule": lambda model: setattr(model[0], "inner", nn.Linear(2, 2, bias=False)),
    "new submodule": lambda model: setattr(model[1], "more", nn.ReLU()),
    "submodule gone": lambda model: setattr(model[0], "norm", None),
    "order of submodules": lambda model: model._modules.update({"1": model._modules.pop("1")}),
    "class": lambda model: setattr(model[1], "__class__", nn.Dropout1d),
    "hook": lambda model: model[1].register_forward_hook(lambda *_: None),
    "hook of the whole": lambda model: model.register_forward_pre_hook(lambda *_: None, with_kwargs=True),
    "full backward hook": lambda model: model[4].register_full_backward_hook(lambda *_: None),
    "method": lambda model: setattr(model[4], "forward", lambda x: x),
    "alias": lambda model: setattr(model[4], "weight", model[0].inner.weight),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen(what: str) -> None:
    model = _model()
    reader = StateReader(model)
    before = reader.read(frozenset())
    assert reader.read(frozenset()) is before
    assert before == state_of(model)
    CHANGES[what](model)
    after = reader.read(frozenset())
    assert after != before
    assert changed(before, after)
    assert after == state_of(model)
    assert reader.read(frozenset()) is after


def test_containers_that_keep_an_order_of_their_own() -> None:
    model = _model()
    _ordered(model)
    reader = StateReader(model)
    before = reader.read(frozenset())
    assert reader.read(frozenset()) is before
    model[4]._parameters.move_to_end("weight")  # which the order of a plain dict does not tell
    assert reader.read(frozenset()) != before


def test_settings_of_the_process_are_seen() -> None:
    model = _model()
    reader = StateReader(model)
    before = reader.read(frozenset())
    with torch.inference_mode():
        assert reader.read(frozenset()) != before
    assert reader.read(frozenset()) is before


def test_a_state_that_was_before_is_the_same_object() -> None:
    model = _model()
    reader = StateReader(model)
    training = reader.read(frozenset())
    model.eval()
    evaluation = reader.read(frozenset())
    for _ in range(3):
        model.train()
        assert reader.read(frozenset()) is training
        model.eval()
        assert reader.read(frozenset()) is evaluation


def test_equal_values_in_new_objects_are_no_change_and_cost_a_look_at_their_module_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _model()
    reader = StateReader(model)
    state = reader.read(frozenset())
    model[0].width = int("1000")
    assert model[0].width is not state.modules["0"]["width"]
    again = reader.read(frozenset())
    assert again == state
    seen: list[nn.Module] = []
    write = SnapshotWriter.module
    monkeypatch.setattr(SnapshotWriter, "module", lambda self, each: seen.append(each) or write(self, each))
    model[0].width = int("1000")
    assert reader.read(frozenset()) is again
    assert model[0] in seen
    assert model[2].inner not in seen
    model[0].width = 1001
    assert reader.read(frozenset()) != again


def test_a_default_device_without_an_index_is_seen() -> None:
    model = _model()
    reader = StateReader(model)
    before = reader.read(frozenset())
    with torch.device("meta"):
        inside = reader.read(frozenset())
        assert inside != before
        assert reader.read(frozenset()) is inside
    assert reader.read(frozenset()) is before


def test_function_modes_see_no_more_than_in_a_snapshot() -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    model = _model()
    seen: list[Any] = []
    with Counting():
        state_of(model)
        alone = len(seen)
        seen.clear()
        reader = StateReader(model)
        state = reader.read(frozenset())
        assert len(seen) == alone
        seen.clear()
        assert reader.read(frozenset()) is state
        assert len(seen) <= alone


def test_states_that_are_always_new_are_not_kept() -> None:
    model = _model()
    reader = StateReader(model)
    alive: list[weakref.ref[torch.Tensor]] = []
    for _ in range(40):
        model[0].plain = torch.ones(3)
        alive.append(weakref.ref(model[0].plain))
        assert reader.read(frozenset()) == state_of(model)
    gc.collect()
    assert sum(each() is not None for each in alive) == 1
    for _ in range(REST):
        reader.read(frozenset())
    state = reader.read(frozenset())
    assert reader.read(frozenset()) is state, "it is found again after a while"


def test_attributes_of_parameters_that_cannot_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    for parameter in model.parameters():  # as transformers' from_pretrained leaves it
        parameter._is_hf_initialized = True
    reader = StateReader(model)
    state = reader.read(frozenset())
    seen: list[nn.Module] = []
    write = SnapshotWriter.module
    monkeypatch.setattr(SnapshotWriter, "module", lambda self, each: seen.append(each) or write(self, each))
    assert reader.read(frozenset()) is state
    monkeypatch.undo()
    assert {type(each) for each in seen} == {Block}, "of which one buffer is not saved"
    model[4].weight._is_hf_initialized = False
    changed_one = reader.read(frozenset())
    assert changed_one != state
    del model[4].weight._is_hf_initialized
    assert reader.read(frozenset()) not in (state, changed_one)
    model[4].weight.__dict__ = {"_is_hf_initialized": True}
    assert reader.read(frozenset()) == state
    model[4].weight.more = [1]
    assert reader.read(frozenset()) == state_of(model) != state


def test_a_training_flag_that_has_no_truth_value() -> None:
    model = _model()
    model[1].training = torch.ones(2)
    reader = StateReader(model)
    assert reader.read(frozenset()) is reader.read(frozenset())


def test_names_that_are_ignored() -> None:
    model = _model()
    reader = StateReader(model)
    ignored = {"width"}
    state = reader.read(ignored)
    model[0].width = 7
    assert reader.read(ignored) is state
    model[0].sizes = (3,)
    assert reader.read(ignored) != state
    everything = reader.read(set())
    assert everything.modules["0"]["width"] == 7
    model[0].width = 8
    assert reader.read(set()) != everything
    ignored.add("sizes")
    less = reader.read(ignored)
    assert "sizes" not in less.modules["0"]
    everything.forget({"sizes"})  # as is done to states that are known, when a name is ignored
    assert "sizes" in reader.read(set()).modules["0"]


def test_limits_of_a_snapshot_are_the_same_in_each_reading() -> None:
    model = _model()
    for number, module in enumerate(model.modules()):  # more values than a snapshot has room for
        module.many = [{"a": [Settings(), Settings()]} for _ in range(40 + number)]
        if number % 3 == 0:
            module.register_forward_hook(lambda *_: None)
    reader = StateReader(model)
    state = reader.read(frozenset())
    assert reader.read(frozenset()) is state
    model[0].inner.many[0]["a"][1].alpha = 7.0
    assert (reader.read(frozenset()) == state) == (state_of(model) == state)


def test_random_changes_are_seen_as_a_snapshot_sees_them() -> None:
    drawn = random.Random(0)
    for _ in range(60):
        model = _model()
        reader = StateReader(model)
        known: list[PythonState] = []
        for _ in range(12):
            kind = drawn.random()
            if kind < 0.3:
                with contextlib.suppress(AttributeError, KeyError, TypeError):  # after an earlier change
                    CHANGES[drawn.choice(list(CHANGES))](model)
            elif kind < 0.6:
                model.train(drawn.random() < 0.5)
            state = reader.read(frozenset())
            assert state == state_of(model)
            for each in known:
                assert (each == state) == (not changed(each, state))
            known.append(state)
