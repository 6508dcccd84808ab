"""An optimizer's whole state, gathered from the ranks, in the form of a single process's optimizer, and back.

First every rank tells the outline of what it has (a few hundred bytes a parameter, with small tensors in it); what
is wrong anywhere is then known everywhere, before anybody waits for a tensor. Then tensors come one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from rannd.errors import UsageError
from rannd.runtime.comm.gather_objects import agree_on_errors, collect, seal, unseal
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.optim.local_optimizer import WholeOptimizer
from rannd.runtime.optim.placeholder import without_placeholder
from rannd.runtime.parameters.ownership import Parameters

SMALL = 16
"""Elements of tensors that travel with the outline."""
MARK = "\0tensor"

Key = tuple[int, str]
"""A parameter: (number of its model, name in it); (-1 - group, place in it) for what belongs to no deployed model."""


@dataclass(frozen=True)
class Groups:
    """The whole groups, the same on all ranks."""

    keys: list[list[Key]]
    names: list[list[str] | None]

    @property
    def flat(self) -> list[Key]:
        """All parameters, in the order by which states number them."""
        return list(dict.fromkeys(key for group in self.keys for key in group))


def gather_optimizer(whole: WholeOptimizer, *, everywhere: bool) -> dict[str, Any]:
    """The state of all parameters, tensors as copies on the CPU, on rank 0 (or all ranks); {} on others. Collective.

    It has the form of ``state_dict()`` of an optimizer made of the same parameters in one process, and loads there.
    """
    world = whole.world
    if not whole.members:
        return copied(whole.own_state_dict()) if everywhere or world.rank == 0 else {}
    told, groups, states = _gather(whole, everywhere=everywhere)
    if not everywhere and world.rank != 0:
        return {}
    number = {key: place for place, key in enumerate(groups.flat)}
    packed: dict[Any, Any] = {number[key]: states[key] for key in groups.flat if key in states}
    other: dict[Any, Any] = {}
    extra: dict[str, Any] = {}
    for each in reversed(told):  # rank 0's win
        other.update(each["other"])
        extra.update(each["extra"])
    settings = []
    for place, setting in enumerate(told[0]["settings"]):
        group = dict(setting)
        if groups.names[place] is not None:
            group["param_names"] = list(groups.names[place] or [])
        group["params"] = [number[key] for key in groups.keys[place]]
        settings.append(group)
    return {"state": {**packed, **other}, "param_groups": settings, **extra}


def gather_states(whole: WholeOptimizer, parameters: Parameters) -> dict[str, Any]:
    """What the optimizer keeps of a deployed model's parameters, by name, on every rank. Collective.

    UsageError on all ranks where some of it cannot be sent.
    """
    _, _, states = _gather(whole, everywhere=True)
    model = whole.members.index(parameters)
    return {name: state for (number, name), state in states.items() if number == model}


def _gather(
    whole: WholeOptimizer, *, everywhere: bool
) -> tuple[list[dict[str, Any]], Groups, dict[Key, dict[str, Any]]]:
    """What each rank tells but for large tensors, the whole groups, and the states, on rank 0 (or all ranks)."""
    world = whole.world
    meet(world, Phase.OPTIMIZER_STATE_DICT)
    error = whole.check_groups()
    outline = b""
    tensors: dict[Key, list[torch.Tensor]] = {}
    if not error:
        try:
            outline = _outline(whole, tensors)
        except UsageError as exc:
            error = str(exc)
    agree_on_errors(world, error, UsageError)
    told: list[dict[str, Any]] = [unseal(data) for data in world.gather_bytes(outline)]
    states: dict[Key, dict[str, Any]] = {}
    for rank, each in enumerate(told):
        for key, (skeleton, shapes) in each["states"].items():
            found: list[torch.Tensor | None] = []
            for place, (shape, dtype) in enumerate(shapes):
                mine = tensors[key][place] if rank == world.rank else None
                found.append(collect(world, mine, shape, dtype, rank, everywhere=everywhere))
            if everywhere or world.rank == 0:
                states[key] = filled(skeleton, found)
    return told, merge_groups(told), states


def load_optimizer(whole: WholeOptimizer, state: Mapping[str, Any]) -> None:
    """Load a whole state, given on every rank; each takes what it holds. Collective.

    UsageError on all ranks where it does not fit on some; nothing has changed then.
    """
    world, optimizer = whole.world, whole.optimizer
    if not whole.members:
        whole.own_load_state_dict(dict(state))
        return
    meet(world, Phase.OPTIMIZER_LOAD_STATE_DICT)
    error = whole.check_groups()
    agree_on_errors(world, error, UsageError)
    told = [msgspec.msgpack.decode(data, type=_Told) for data in world.gather_bytes(_tell_groups(whole))]
    groups = merge_groups([msgspec.structs.asdict(each) for each in told])
    local: dict[str, Any] = {}
    error = _misfit(groups, state)
    if not error:
        local = _local(whole, groups, state)
    agree_on_errors(world, error, UsageError)
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        whole.own_load_state_dict(local)
    except Exception as exc:  # the class's own checks raise what they like
        error = f"{type(optimizer).__qualname__} cannot load this state: {exc}"
    try:
        agree_on_errors(world, error, UsageError)
    except UsageError:
        optimizer.__setstate__(before)
        raise


def local_groups(whole: WholeOptimizer) -> list[list[Key]]:
    """This rank's word on which parameters the groups have; late groups may have been told in part only."""
    found = []
    for number, group in enumerate(whole.groups):
        keys: list[Key] = []
        for place, parameter in enumerate(group):
            keys.append(whole.place(parameter) or (-1 - number, str(place)))
        found.append(keys)
    return found


def merge_groups(told: Sequence[Mapping[str, Any]]) -> Groups:
    """The groups that all ranks together have told.

    Ranks that were given the same parameters agree. Where a script gave each rank only its own (a group that was
    added once the model was deployed), the order of the ranks counts, and within a rank the script's.
    """
    keys: list[list[Key]] = []
    names: list[list[str] | None] = []
    for place in range(len(told[0]["groups"])):
        lists = [[(int(first), second) for first, second in each["groups"][place]] for each in told]
        merged = dict.fromkeys(key for each in lists for key in each)
        keys.append(list(merged))
        labels = [each["names"][place] for each in told]
        if labels[0] is None:
            names.append(None)
        else:
            pairs = [pair for each, texts in zip(lists, labels, strict=True) for pair in zip(each, texts, strict=True)]
            label = dict(pairs)
            names.append([label[key] for key in merged])
    return Groups(keys, names)


# -- outlines -------------------------------------------------------------------------------------------------


class _Told(msgspec.Struct):
    groups: list[list[tuple[int, str]]]
    names: list[list[str] | None]


def _tell_groups(whole: WholeOptimizer) -> bytes:
    return msgspec.msgpack.encode(_Told(local_groups(whole), whole.group_names))


def _outline(whole: WholeOptimizer, tensors: dict[Key, list[torch.Tensor]]) -> bytes:
    """What this rank has, but for the large tensors, which go to `tensors`."""
    packed = whole.own_state_dict()
    keys = {
        id(parameter): key
        for group, told in zip(whole.groups, local_groups(whole), strict=True)
        for parameter, key in zip(group, told, strict=True)
    }
    held = [p for group in whole.optimizer.param_groups for p in without_placeholder(group)]
    states: dict[Key, Any] = {}
    other: dict[Any, Any] = {}
    for index, value in packed["state"].items():
        if not isinstance(index, int) or not 0 <= index < len(held):
            other[index] = copied(value)
            continue
        parameter = held[index]
        if whole.holder(parameter) == whole.world.rank:
            key = keys[id(parameter)]
            large: list[tuple[tuple[Any, ...], torch.Tensor]] = []
            skeleton = hollowed(value, large)
            tensors[key] = [tensor for _, tensor in large]
            states[key] = (skeleton, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors[key]])
    settings = [
        {name: copied(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in packed["param_groups"]
    ]
    extra = {name: copied(value) for name, value in packed.items() if name not in ("state", "param_groups")}
    said = {
        "groups": local_groups(whole),
        "names": whole.group_names,
        "settings": settings if whole.world.rank == 0 else [],
        "states": states,
        "other": other,
        "extra": extra,
    }
    return seal(said, f"the state of {type(whole.optimizer).__qualname__}")


def hollowed(
    value: Any, large: list[tuple[tuple[Any, ...], torch.Tensor]], path: tuple[Any, ...] = (), small: int = SMALL
) -> Any:
    """A value without its large tensors, which go to `large` with their paths; small ones as copies on the CPU."""
    if isinstance(value, torch.Tensor):
        if value.numel() <= small:
            return value.detach().to("cpu", copy=True)
        large.append((path, value))
        return {MARK: len(large) - 1}
    if isinstance(value, dict):
        return {key: hollowed(each, large, (*path, key), small) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(hollowed(each, large, (*path, place), small) for place, each in enumerate(value))
    return value


def filled(skeleton: Any, large: Sequence[Any]) -> Any:
    """The value of which `hollowed` made a skeleton, with other things in the places of its large tensors."""
    if isinstance(skeleton, dict):
        if set(skeleton) == {MARK}:
            return large[skeleton[MARK]]
        return {key: filled(each, large) for key, each in skeleton.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(filled(each, large) for each in skeleton)
    return skeleton


def copied(value: Any) -> Any:
    """A value with its tensors as copies on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(each) for each in value)
    return value


# -- back -----------------------------------------------------------------------------------------------------


def _misfit(groups: Groups, state: Mapping[str, Any]) -> str:
    """'' or why a whole state is not one of this optimizer."""
    hint = "give every rank the whole state, as rank 0 got it from state_dict(from_global=True)"
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return f"an optimizer's state has 'state' and 'param_groups', this is {_brief(state)}; {hint}"
    sizes = [len(group["params"]) for group in state["param_groups"]]
    wanted = [len(keys) for keys in groups.keys]
    if sizes != wanted:
        return (
            f"the state has groups of {sizes} parameters, the optimizer of {wanted}; make the optimizer from the same "
            f"parameters, in the same groups and order, and {hint}"
        )
    return ""


def _brief(value: Any) -> str:
    return (
        f"a dict with {sorted(map(str, value))[:5]}" if isinstance(value, Mapping) else f"a {type(value).__qualname__}"
    )


def _local(whole: WholeOptimizer, groups: Groups, state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a whole state that this rank holds, numbered as its class numbers it here."""
    place: dict[Any, int] = {}
    settings = []
    own = zip(whole.optimizer.param_groups, local_groups(whole), whole.groups, strict=True)
    for (group, told, parameters), keys, saved in zip(own, groups.keys, state["param_groups"], strict=True):
        position = {key: n for n, key in enumerate(keys)}
        key_of = {id(parameter): key for parameter, key in zip(parameters, told, strict=True)}
        held = [position[key_of[id(parameter)]] for parameter in without_placeholder(group)]
        setting = {name: value for name, value in saved.items() if name not in ("params", "param_names")}
        setting["params"] = [place.setdefault(saved["params"][n], len(place)) for n in held]
        if "param_names" in saved:
            setting["param_names"] = [saved["param_names"][n] for n in held]
        settings.append(setting)
    numbers = {number for group in state["param_groups"] for number in group["params"]}
    packed = {place.get(key, key): value for key, value in state["state"].items() if key in place or key not in numbers}
    return {**state, "state": packed, "param_groups": settings}
