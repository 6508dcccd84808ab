"""State by parameter name: split into a skeleton and tensors, merged from ranks, and numbered again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rannd.errors import UsageError
from rannd.runtime.optim.state_codec import MARK, NamedState, copied, merge
from rannd.runtime.storage.sealing import seal, unseal

SIZES = st.sampled_from([(), (0,), (3,), (4, 5), (2, 3, 4)])
TENSORS = st.builds(lambda size, number: torch.full(size, float(number)), SIZES, st.integers(0, 99))
LEAVES = TENSORS | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, types included."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """The state_dict of an optimizer of some groups, named or not; of some parameters without state."""
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    named = draw(st.booleans())
    numbers = iter(range(sum(sizes)))
    groups = []
    for size in sizes:
        group: dict[str, Any] = {"lr": draw(st.floats(0, 1) | TENSORS), "params": [next(numbers) for _ in range(size)]}
        if named:
            group["param_names"] = [f"label {number}" for number in group["params"]]
        groups.append(group)
    states: dict[Any, Any] = {
        number: draw(st.dictionaries(st.text(max_size=3), VALUES, max_size=3))
        for number in range(sum(sizes))
        if draw(st.booleans())
    }
    return {"state": {**states, "counter": draw(VALUES)}, "param_groups": groups, "rounds": draw(VALUES)}


def keys_of(state: dict[str, Any]) -> list[list[str]]:
    return [[f"p{number}" for number in group["params"]] for group in state["param_groups"]]


@given(state_dicts(), st.integers(0, 16), st.data())
def test_what_ranks_send_is_the_whole_again(state: dict[str, Any], inline: int, data: st.DataObject) -> None:
    keys = keys_of(state)
    owner = {key: data.draw(st.integers(0, 2), label=key) for group in keys for key in group}
    parts = []
    for rank in range(3):
        # what a rank has: its parameters, numbered from 0; settings are rank 0's
        own = [[key for key in group if owner[key] == rank] for group in keys]
        part = NamedState.of(NamedState.of(state, keys).state_dict(own), own)
        for group, names, whole in zip(part.groups, keys, state["param_groups"], strict=True):
            group["params"] = names
            if "param_names" in whole:
                group["param_names"] = whole["param_names"]
            if rank:
                group.pop("lr")
        skeleton, tensors = part.split(inline=inline)
        assert all(inline == 0 or tensor.numel() > inline for tensor in tensors.values())
        arrived = NamedState[str](**unseal(seal(vars(skeleton), "it")))
        parts.append(arrived.join(tensors.__getitem__))
    found = merge(parts)
    assert found.keys == keys
    assert same(found.state_dict(keys), state)


@given(state_dicts(), st.data())
def test_a_part_is_numbered_as_its_optimizer_numbers_it(state: dict[str, Any], data: st.DataObject) -> None:
    keys = keys_of(state)
    held = [data.draw(st.lists(st.sampled_from(group), unique=True)) if group else [] for group in keys]
    part = NamedState.of(state, keys).state_dict(held)
    assert [number for group in part["param_groups"] for number in group["params"]] == list(range(sum(map(len, held))))
    assert part["state"]["counter"] is state["state"]["counter"]
    assert part["rounds"] is state["rounds"]
    for names, group, whole in zip(held, part["param_groups"], state["param_groups"], strict=True):
        assert same(group["lr"], whole["lr"])
        assert ("param_names" in group) == ("param_names" in whole)
        for place, (name, number) in enumerate(zip(names, group["params"], strict=True)):
            before = int(name[1:])
            assert (number in part["state"]) == (before in state["state"])
            assert part["state"].get(number) is state["state"].get(before)
            if "param_names" in group:
                assert group["param_names"][place] == f"label {before}"
    assert len(part["state"]) == 1 + sum(int(name[1:]) in state["state"] for group in held for name in group)


def test_tensors_apart_are_the_state_s_own_and_others_are_copies() -> None:
    big, small, setting = torch.ones(20), torch.ones(30)[:2], torch.ones(3)
    state = {"state": {0: {"a": [big, small]}}, "param_groups": [{"lr": setting, "params": [0]}]}
    before = copy.deepcopy(state)
    skeleton, tensors = NamedState.of(state, [["p"]]).split(inline=4)
    assert tensors.keys() == {("p", "a", 0)}
    assert tensors["p", "a", 0] is big
    assert skeleton.states["p"]["a"][0] == {MARK: 0}
    for mine, theirs in ((skeleton.states["p"]["a"][1], small), (skeleton.groups[0]["lr"], setting)):
        assert torch.equal(mine, theirs)
        assert mine.untyped_storage().nbytes() == mine.nbytes  # not all of what it was a part of
        mine.zero_()
    assert same(state, before)
    assert same(copied(state), before)


def test_only_what_is_wanted_is_joined() -> None:
    state = {"state": {0: {"a": torch.ones(2)}, 1: {"a": torch.ones(3)}}, "param_groups": [{"params": [0, 1]}]}
    skeleton, _ = NamedState.of(state, [["p", "q"]]).split()
    asked: list[Any] = []
    found = skeleton.join(asked.append, {"q"})
    assert asked == [("q", "a")]
    assert list(found.states) == ["q"]
    assert list(skeleton.states) == ["p", "q"]


def test_groups_that_ranks_were_given_in_part() -> None:
    one = NamedState[str]([{"lr": 1, "params": ["a", "b"]}, {"lr": 2, "params": ["x"]}], {}, {"n": 1}, {"e": 1})
    other = NamedState[str]([{"params": ["a", "b"]}, {"params": ["x", "y"]}], {}, {"n": 2, "m": 3}, {"e": 2})
    found = merge([one, other])
    assert found.groups == [{"lr": 1, "params": ["a", "b"]}, {"lr": 2, "params": ["x", "y"]}]
    assert found.other == {"n": 1, "m": 3}  # rank 0's counts
    assert found.extra == {"e": 1}
    with pytest.raises(UsageError, match=r"have \[2, 1\] groups; call add_param_group on every rank"):
        merge([one, NamedState[str]([{"params": ["a"]}], {}, {}, {})])
