"""Collectives: gather the state of all ranks' parts of an optimizer into one state_dict, and load one into the parts.

The state_dict is that of an optimizer of all parameters in a single process. Each rank first sends the skeleton of its
part (a few hundred bytes a parameter, small tensors included), so that an error on any rank is raised on all before a
rank waits for a tensor. Then the large tensors follow, one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rannd.errors import UsageError
from rannd.runtime.comm.gather_objects import agree_on_errors, collect
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.optim.local_optimizer import WholeOptimizer
from rannd.runtime.optim.state_codec import NamedState, TensorName, copied, merge
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.parameters.state_elsewhere import ensure_here
from rannd.runtime.storage.sealing import seal, unseal

SMALL = 16
"""Tensors of up to so many elements are sent with the skeleton."""

ParameterKey = tuple[int, str]
"""(number of the model, name in it); (-1 - group, position in it) for what belongs to no deployed model."""


def gather_optimizer(whole: WholeOptimizer, *, everywhere: bool) -> dict[str, Any]:
    """The state of all parameters, tensors as copies on the CPU, on rank 0 (or all ranks); {} on others. Collective.

    It has the form of ``state_dict()`` of an optimizer made of the same parameters in one process, and loads there.
    """
    world = whole.world
    if not whole.members:
        return copied(whole.own_state_dict()) if everywhere or world.rank == 0 else {}
    state = _gather(whole, everywhere=everywhere)
    return state.state_dict(state.keys) if everywhere or world.rank == 0 else {}


def gather_states(whole: WholeOptimizer, parameters: Parameters) -> dict[str, Any]:
    """The state of each of a deployed model's parameters, by name, on every rank. Collective.

    UsageError on all ranks where some of it cannot be sent.
    """
    model = whole.members.index(parameters)
    return {name: state for (number, name), state in _gather(whole, everywhere=True).states.items() if number == model}


def _gather(whole: WholeOptimizer, *, everywhere: bool) -> NamedState[ParameterKey]:
    """All ranks' state, on rank 0 (or all ranks); on the others without the large tensors."""
    world = whole.world
    meet(world, Phase.OPTIMIZER_STATE_DICT)
    error = whole.check_groups()
    sealed = b""
    tensors: dict[TensorName, torch.Tensor] = {}
    if not error:
        try:
            skeleton, tensors = whole.named_state(_keys(whole)).split(inline=SMALL)
            about = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
            sealed = seal((vars(skeleton), about), f"the state of {type(whole.optimizer).__qualname__}")
        except UsageError as exc:
            error = str(exc)
    agree_on_errors(world, error, UsageError)
    parts = []
    for rank, data in enumerate(world.gather_bytes(sealed)):
        fields, about = unseal(data)
        found = {
            name: collect(world, tensors.get(name), shape, dtype, rank, everywhere=everywhere)
            for name, (shape, dtype) in about.items()
        }
        parts.append(NamedState[ParameterKey](**fields).join(found.__getitem__))

    def shape(key: ParameterKey) -> torch.Size:
        return whole.members[key[0]].tensors[key[1]].shape

    return merge(parts, shape if everywhere or world.rank == 0 else None)


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
    own = _keys(whole)
    sealed = seal(whole.named_groups(own), "the names of an optimizer's parameters")
    keys = merge([NamedState[ParameterKey](unseal(data), {}, {}, {}) for data in world.gather_bytes(sealed)]).keys
    local: dict[str, Any] = {}
    error = _misfit(keys, state)
    if not error:
        local = whole.part_of(NamedState.of(state, keys), own).state_dict(whole.held_keys(own))
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


def _keys(whole: WholeOptimizer) -> list[list[ParameterKey]]:
    """Keys of all parameters of each group that this rank knows of: a group added late may have others elsewhere."""
    return [
        [whole.place(parameter) or (-1 - number, str(place)) for place, parameter in enumerate(group)]
        for number, group in enumerate(whole.groups)
    ]


def _misfit(keys: Sequence[Sequence[ParameterKey]], state: Mapping[str, Any]) -> str:
    """'' or why a whole state is not one of this optimizer."""
    hint = "give every rank the whole state, as rank 0 got it from state_dict(from_global=True)"
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return f"an optimizer's state has 'state' and 'param_groups', this is {_brief(state)}; {hint}"
    try:
        ensure_here(state, "load_state_dict")
    except UsageError as exc:
        return str(exc)
    sizes = [len(group["params"]) for group in state["param_groups"]]
    wanted = [len(names) for names in keys]
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
