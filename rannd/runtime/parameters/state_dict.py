"""The whole model's state, gathered from the ranks that hold its parts, and given back to them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.comm.gather_objects import agree_on_errors, collect
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.comm.world import World
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.parameters.substitutes import StandIns, TensorSlot, places
from rannd.runtime.storage.weight_files import Given


def gather_tensor(world: World, parameters: Parameters, name: str, *, everywhere: bool) -> torch.Tensor | None:
    """A copy on the CPU of a parameter or buffer, on rank 0 (or all ranks); None on the others. Collective."""
    tensor = parameters.tensors[name]
    holder = world.rank_of_slot[parameters.slots[name][0]]
    return collect(world, tensor, tensor.shape, tensor.dtype, holder, everywhere=everywhere)


def copy_of(world: World, parameters: Parameters, name: str) -> torch.Tensor:
    """A copy on the CPU of a parameter or buffer, by its first name, on all ranks. Collective.

    StepError where ranks ask for different ones.
    """
    meet(world, Phase.GET_PARAM, name)
    found = gather_tensor(world, parameters, name, everywhere=True)
    assert found is not None
    return found


def gather_state(
    world: World, parameters: Parameters, model: nn.Module, *, everywhere: bool, keep_vars: bool, **options: Any
) -> dict[str, Any]:
    """The model's own ``state_dict(**options)``, of whole values on the CPU; empty where it does not go. Collective.

    Values come one after the other; a rank that does not collect them never has more than its own.
    """
    if keep_vars:
        raise UsageError(
            "state_dict(keep_vars=True) gives the parameters themselves, but this rank holds only its own; use "
            "model.named_parameters() for those"
        )
    meet(world, Phase.STATE_DICT)
    parameters.adopt()
    first = {id(tensor): name for name, tensor in parameters.tensors.items()}
    wanted = dict.fromkeys(first[id(place.original)] for place in places(model) if place.persistent)
    whole = {name: gather_tensor(world, parameters, name, everywhere=everywhere) for name in wanted}
    if not everywhere and world.rank != 0:
        destination: dict[str, Any] | None = options.get("destination")
        return OrderedDict() if destination is None else destination
    with StandIns(model, lambda place: whole.get(first[id(place.original)])):
        state: dict[str, Any] = model.state_dict(**options)
    return state


def own_state(
    parameters: Parameters | None, model: nn.Module, *, prefix: str = "", destination: dict[str, Any] | None = None
) -> dict[str, Any]:
    """This rank's part of the model's state, under all its names: the tensors themselves, without gradients."""
    state: dict[str, Any] = OrderedDict() if destination is None else destination
    if parameters is None:
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        tensors = dict(named)
    else:
        parameters.adopt()
        own = set(parameters.own)
        tensors = {name: parameters.tensors[first] for name, first in parameters.names.items() if first in own}
    wanted = persistent_names(model)
    for name, tensor in tensors.items():
        if name in wanted:
            state[f"{prefix}{name}"] = tensor.detach()
    return state


def load_state(
    world: World,
    parameters: Parameters,
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool,
    assign: bool,
) -> Any:
    """Load a whole state, given on every rank, into what each rank holds. Collective.

    It goes through the model's own ``load_state_dict``, so that hooks, versions and extra state count. When anything
    is wrong on any rank, UsageError on all, and no tensor has changed on any.
    """
    meet(world, Phase.LOAD_STATE_DICT)
    error = ""
    if assign:
        error = (
            "load_state_dict(assign=True) puts other parameters in the places of those that the optimizer and the "
            "deployment hold; load without it, or before the model's first call"
        )
    elif not isinstance(state, Mapping):
        error = f"load_state_dict takes a dict, not a {type(state).__qualname__}"
    agree_on_errors(world, error, UsageError)
    parameters.adopt()
    first = {id(tensor): name for name, tensor in parameters.tensors.items()}
    own = set(parameters.own)
    before = [(module, module.get_extra_state()) for module in model.modules() if _has_extra_state(module)]
    keys: Any = None
    values: list[tuple[str, torch.Tensor]] = []

    def memory(name: str, original: torch.Tensor) -> torch.Tensor:
        return original.clone() if name in own else torch.zeros(original.shape, dtype=original.dtype)

    try:
        keys, values = _through_model(model, first, memory, state, strict=strict)
    except Exception as exc:  # hooks of the user's modules raise what they like
        error = f"the state does not fit the model, nothing of it was loaded: {exc}"
        if not state:
            error += "\nThe state is empty: every rank has to give the whole state, not rank 0 alone"
    try:
        agree_on_errors(world, error, UsageError)
    except UsageError:
        for module, extra in before:
            module.set_extra_state(extra)
        raise
    with torch.no_grad():
        for name, value in values:
            if name in own:
                parameters.tensors[name].copy_(value)
    return keys


def load_later(values: InitialValues, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Take a state for the values that a model on the meta device gets when it is deployed; not collective.

    It goes through the model's own ``load_state_dict``, whose errors are raised as they are.
    """
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(id(tensor), name)

    def memory(name: str, original: torch.Tensor) -> torch.Tensor:
        bare = original.is_meta
        return torch.zeros(original.shape, dtype=original.dtype) if bare else original.clone()

    keys, found = _through_model(model, first, memory, state, strict=strict)
    given = dict(found)
    values.take(Given(given), {name: name for name in given})
    return keys


def _through_model(
    model: nn.Module,
    first: Mapping[int, str],
    memory: Callable[[str, torch.Tensor], torch.Tensor],
    state: Mapping[str, Any],
    *,
    strict: bool,
) -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    """What the model's own ``load_state_dict`` returns, and puts where; the model's own tensors stay as they are.

    Args:
        first: First name of each tensor, by its id.
        memory: Makes what modules may write to that do more than torch does.

    Raises what hooks and overrides of the user's modules raise; UsageError for a shape that would change.
    """
    careful = type(model).load_state_dict is not nn.Module.load_state_dict
    real: dict[str, torch.Tensor] = {}

    def stand_in(place: TensorSlot) -> torch.Tensor | None:
        """A tensor without memory, into whose place the state's is put; or memory, for modules that write."""
        name, original = first[id(place.original)], place.original.detach()
        if not careful and not _writes(place.module):
            return torch.empty_like(original, device="meta") if place.persistent else None
        if name not in real:
            real[name] = memory(name, original)
        return real[name]

    values: list[tuple[str, torch.Tensor]] = []
    with StandIns(model, stand_in) as standins:
        before_load = {
            id(place): (place.standin.is_meta, place.standin._version)
            for place in standins.places
            if place.standin is not None
        }
        options = {} if careful else {"assign": True}
        keys: Any = model.load_state_dict(_detached(state), strict=strict, **options)
        for place in standins.places:
            loaded = place.current
            if loaded is None or place.standin is None or loaded.is_meta:
                continue
            if loaded is place.standin and (loaded.is_meta, loaded._version) == before_load[id(place)]:
                continue
            if loaded.shape != place.original.shape:
                raise UsageError(
                    f"{place.name} has shape {tuple(loaded.shape)} after it was loaded, but the model was wrapped with "
                    f"{tuple(place.original.shape)}, which cannot change; load this state before the model is wrapped"
                )
            values.append((first[id(place.original)], loaded.detach()))
    return keys, values


def persistent_names(model: nn.Module) -> set[str]:
    """Names of all tensors in the model's state, also the later names of modules that it has twice."""
    names = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for entries in (module._parameters, module._buffers):
            for key in entries:
                if entries is module._parameters or key not in module._non_persistent_buffers_set:
                    names.add(f"{path}.{key}" if path else key)
    return names


def _writes(module: nn.Module) -> bool:
    """Whether a module may do more in `load_state_dict` than torch does, to its own tensors."""
    return (
        type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        or bool(module._load_state_dict_pre_hooks)
        or bool(module._load_state_dict_post_hooks)
    )


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _detached(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """A copy whose tensors and versions `load_state_dict` may mark as its own."""
    copied = OrderedDict(
        (name, value.detach() if isinstance(value, torch.Tensor) else value) for name, value in state.items()
    )
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        copied._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    return copied
