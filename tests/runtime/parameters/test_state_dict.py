"""The state of a deployed model is what the modules' own code makes of it: hooks, versions, extra state, overrides."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import UsageError


class Marked(nn.Module):
    """Extra state, a buffer that is not saved, an LSTM (it keeps its weights twice), BatchNorm (it has versions)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.mark = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lstm(x)[0][:, -1]) * self.scratch

    def get_extra_state(self) -> dict[str, int]:
        return {"mark": self.mark}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.mark = state["mark"]


def deployed(model: nn.Module, *inputs: torch.Tensor) -> pyrannc.RaNNCModule:
    wrapped = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(*inputs)
    return wrapped


def marked(mark: int = 1) -> pyrannc.RaNNCModule:
    inner = Marked()
    inner.mark = mark
    return deployed(inner, torch.randn(3, 2, 4))


def test_names_versions_and_extra_state_are_the_models() -> None:
    model = marked(7)
    state = model.state_dict()
    plain = Marked()
    assert list(state) == list(plain.state_dict())
    assert state._metadata == plain.state_dict()._metadata
    plain.load_state_dict(state)
    assert plain.mark == 7
    other = marked()
    weights = other._inner.lstm.weight_ih_l0
    assert not other.load_state_dict(state).missing_keys
    assert other._inner.mark == 7
    assert other._inner.lstm.weight_ih_l0 is weights
    assert other._inner.lstm._flat_weights[0] is weights
    x = torch.randn(5, 2, 4)
    for each in (model, other):
        each.eval()
    torch.testing.assert_close(other(x), model(x))


def test_states_are_copies_and_are_not_marked_by_loading() -> None:
    model = marked()
    state = model.state_dict()
    before = copy.deepcopy(state)
    model.load_state_dict(state)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert all(torch.equal(before[name], state[name]) for name in state if not name.endswith("_extra_state"))
    assert state._metadata == before._metadata
    assert all(value.requires_grad is False for value in state.values() if isinstance(value, torch.Tensor))


def test_prefix_destination_and_hooks() -> None:
    model = marked()
    model._inner.norm.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.__setitem__(prefix + "sum", module.weight.sum())
    )
    into: OrderedDict[str, Any] = OrderedDict(old=1)
    into._metadata = OrderedDict()
    state = model.state_dict(destination=into, prefix="m.")
    assert state is into
    assert state["m.norm.sum"] == 4
    assert {name.split(".")[0] for name in state} == {"old", "m"}
    model._inner.norm.register_load_state_dict_pre_hook(
        lambda module, state, prefix, *rest: state.pop(prefix + "sum", None)
    )
    plain = {name.removeprefix("m."): value for name, value in state.items() if name != "old"}
    plain["norm.weight"] = torch.full((4,), 3.0)
    assert str(model.load_state_dict(plain)) == "<All keys matched successfully>"
    assert torch.equal(model._inner.norm.weight, torch.full((4,), 3.0))


def test_keys_that_do_not_match_without_strict() -> None:
    model = marked()
    state = model.state_dict()
    del state["norm.bias"]
    state["more"] = torch.zeros(1)
    state["norm.weight"] = torch.full((4,), 2.0, dtype=torch.float64)
    keys = model.load_state_dict(state, strict=False)
    assert keys.missing_keys == ["norm.bias"]
    assert keys.unexpected_keys == ["more"]
    assert torch.equal(model._inner.norm.weight, torch.full((4,), 2.0))


def test_a_state_that_does_not_fit_changes_nothing_not_even_extra_state() -> None:
    model = marked(1)
    before = model.state_dict()
    state = marked(9).state_dict()
    state["norm.bias"] = torch.zeros(5)
    with pytest.raises(UsageError, match=r"size mismatch for norm\.bias"):
        model.load_state_dict(state)
    assert model._inner.mark == 1
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if not name.endswith("_extra_state"))
    with pytest.raises(UsageError, match="takes a dict, not a list"):
        model.load_state_dict([])  # type: ignore[arg-type]


class Writing(nn.Module):
    """Does more in loading than torch: takes an old name, and writes into its tensors itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("loads", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "scale" in state:
            state[prefix + "weight"] = state.pop(prefix + "scale")
        super()._load_from_state_dict(state, prefix, *rest)
        with torch.no_grad():
            self.weight.mul_(2)
            self.loads += 1


def test_a_module_that_loads_in_its_own_way() -> None:
    model = deployed(nn.Sequential(Writing(), nn.Linear(4, 4)), torch.randn(3, 4))
    state = model.state_dict()
    state["0.scale"] = state.pop("0.weight") + 2
    model.load_state_dict(state)
    assert torch.equal(model._inner[0].weight, torch.full((4,), 6.0))
    assert model._inner[0].loads == 1
    assert torch.equal(model(torch.ones(1, 4)), model._inner[1](torch.full((1, 4), 6.0)))


class Overriding(nn.Sequential):
    """An override that knows no `assign`."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict({name: value + 1 for name, value in state_dict.items()}, strict)


def test_a_model_that_overrides_load_state_dict() -> None:
    model = deployed(Overriding(nn.Linear(4, 4)), torch.randn(3, 4))
    state = model.state_dict()
    model.load_state_dict(state)
    assert all(torch.equal(value, state[name] + 1) for name, value in model.state_dict().items())


@pytest.mark.parametrize("same", [True, False])
def test_tied_names(same: bool) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x))

    model, plain = deployed(Tied(), torch.randn(3, 4)), Tied()
    value = torch.randn(4, 4)
    state = {"one.weight": value, "two.weight": value if same else value + 1}
    for each in (model, plain):
        each.load_state_dict(state)
    assert torch.equal(model.state_dict()["one.weight"], plain.one.weight)
    for each in (model, plain):
        assert each.load_state_dict({"one.weight": value}, strict=False).missing_keys == ["two.weight"]
    assert torch.equal(model.state_dict()["two.weight"], plain.two.weight)


def test_arguments_that_mean_something_else_once_deployed() -> None:
    model = marked()
    state = model.state_dict()
    with pytest.raises(UsageError, match="keep_vars=True"):
        model.state_dict(keep_vars=True)
    with pytest.raises(UsageError, match="assign=True"):
        model.load_state_dict(state, assign=True)
    own = model.state_dict(sharded=True)
    assert set(own) == {name for name in state if not name.endswith("_extra_state")}
    assert own["norm.weight"].data_ptr() == model._inner.norm.weight.data_ptr()
    gathered = model.state_dict(no_hook=True)  # RaNNC's argument, without effect
    assert list(gathered) == list(state)
    assert gathered["norm.weight"].data_ptr() != model._inner.norm.weight.data_ptr()
    assert list(model.state_dict(amp_master_params=False)) == list(state)


def test_part_of_a_larger_module() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = marked(3)
            self.head = nn.Linear(4, 2)

    whole, other = Whole(), Whole()
    other.body._inner.mark = 0
    state = whole.state_dict()
    assert "body.norm.weight" in state
    other.load_state_dict(state)
    assert torch.equal(other.body._inner.norm.weight, whole.body._inner.norm.weight)
    assert other.body._inner.mark == 3
    state["body.norm.weight"] = torch.zeros(7)
    with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight"):
        other.load_state_dict(state)
    del state["body.norm.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*body\.norm\.weight"):
        other.load_state_dict(state)


def test_loading_between_forward_and_backward_gives_no_wrong_gradient() -> None:
    """As in torch: an error, or the gradients of the values that the forward had."""

    def gradient(model: nn.Module, change: bool) -> list[torch.Tensor] | None:
        model.zero_grad()
        loss = model(torch.arange(8.0).reshape(2, 4)).pow(2).sum()
        if change:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        try:
            loss.backward()
        except RuntimeError as exc:
            if "modified by an inplace operation" not in str(exc):
                raise
            return None
        return [parameter.grad.clone() for parameter in model.parameters()]

    model = deployed(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4))
    wanted = gradient(model, change=False)
    found = gradient(model, change=True)
    assert found is None or all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    model.zero_grad()
    assert gradient(model, change=False) is not None


def test_a_buffer_that_was_replaced_is_saved_as_it_is() -> None:
    model = marked()
    model._inner.norm.running_mean = torch.full((4,), 5.0)
    assert torch.equal(model.state_dict()["norm.running_mean"], torch.full((4,), 5.0))
    assert torch.equal(model.state_dict(sharded=True)["norm.running_mean"], torch.full((4,), 5.0))
