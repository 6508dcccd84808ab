"""Gather the state_dict of the whole model from all ranks, and load one into them."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.comm.gather_objects import agree_on_errors, collect
from rannd.runtime.comm.lockstep import Phase, ensure_memory, meet
from rannd.runtime.comm.world import World
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.parameters.state_elsewhere import described, elsewhere, ensure_here
from rannd.runtime.parameters.substitutes import StandIns, TensorSlot, places
from rannd.runtime.storage.sealing import seal, unseal
from rannd.runtime.storage.weight_files import Given


def gather_tensor(
    world: World, parameters: Parameters, name: str, *, everywhere: bool, value: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Copy a parameter or buffer to the CPU of rank 0 (or of all ranks); None on other ranks. Collective.

    `value`: what its holder has in its place; of the same shape and dtype.
    """
    tensor = parameters.tensors[name]
    holders = [world.rank_of_slot[slot] for slot in parameters.slots[name]]
    mine = tensor if value is None else value
    if world.rank in holders:
        mine = parameters.whole(name, mine)
    return collect(world, mine, tensor.shape, tensor.dtype, holders[0], everywhere=everywhere)


def copy_of(world: World, parameters: Parameters, name: str) -> torch.Tensor:
    """Copy a parameter or buffer, given by its first name, to the CPU of all ranks.

    Collective, except for a parameter that every rank holds; StepError if ranks ask for different ones.
    """
    tensor = parameters.tensors[name]
    ensure_memory(Phase.GET_PARAM, 0)
    if isinstance(tensor, nn.Parameter) and parameters.everywhere(name) and name not in parameters.sharded:
        return tensor.detach().to("cpu", copy=True)
    meet(world, Phase.GET_PARAM, name)
    found = gather_tensor(world, parameters, name, everywhere=True)
    assert found is not None
    return found


def gather_state(
    world: World,
    parameters: Parameters,
    model: nn.Module,
    *,
    everywhere: bool,
    keep_vars: bool,
    values: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Call the model's own ``state_dict(**options)`` with full tensors on the CPU.

    Ranks that do not collect get its entries without values, see `state_elsewhere`.

    `values`: what this rank has in place of the tensors that it holds, by first names.

    Tensors are sent one at a time; a rank that does not collect them never holds more than its own. Collective.
    """
    if keep_vars:
        raise UsageError(
            "state_dict(keep_vars=True) gives the parameters themselves, but this rank holds only its own; use "
            "model.named_parameters(own=True) for those"
        )
    meet(world, Phase.STATE_DICT)
    parameters.adopt()
    first = {id(tensor): name for name, tensor in parameters.tensors.items()}
    wanted = dict.fromkeys(first[id(place.original)] for place in places(model) if place.persistent)
    others = values or {}
    whole = {
        name: gather_tensor(world, parameters, name, everywhere=everywhere, value=others.get(name)) for name in wanted
    }

    def make() -> dict[str, Any]:
        with StandIns(model, lambda place: whole.get(first[id(place.original)])):
            state: dict[str, Any] = model.state_dict(**options)
        return state

    if everywhere:
        return make()
    found: dict[str, Any] | None
    found, told = _on_rank_0(
        world, "state_dict", make, lambda state: seal(described(state, options.get("prefix", "")), "its description")
    )
    if found is not None:
        return found
    entries = elsewhere(unseal(told))
    destination: dict[str, Any] | None = options.get("destination")
    if destination is None:
        return entries
    destination.update(entries)
    return destination


def call_whole(
    world: World,
    parameters: Parameters | None,
    model: nn.Module,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a method of the model on rank 0, where all tensors meanwhile have their values, on the CPU. Collective.

    Returns:
        What the method returns; None on other ranks.

    Raises:
        What the method raises, on rank 0; UsageError with its text on other ranks.
    """
    whole: dict[str, torch.Tensor | None] = {}
    first: dict[int, str] = {}
    with world.watch.inside("save_pretrained"):
        meet(world, Phase.SAVE_PRETRAINED)
        if parameters is not None:
            parameters.adopt()
            first = {id(tensor): name for name, tensor in parameters.tensors.items()}
            wanted = dict.fromkeys(first[id(place.original)] for place in places(model))
            whole = {name: gather_tensor(world, parameters, name, everywhere=False) for name in wanted}

    def make() -> Any:
        stand_ins = StandIns(model, lambda place: whole.get(first.get(id(place.original), "")))
        with same_configurations(model), stand_ins:
            return method(*args, **kwargs)

    result, _ = _on_rank_0(world, getattr(method, "__name__", "the method"), make, lambda _: b"")
    return result


@contextlib.contextmanager
def same_configurations(model: nn.Module) -> Iterator[None]:
    """Undo changes of the configurations of a model of Hugging Face, which notes its class and dtype when it is saved.

    Ranks would have different models then, whose graphs are made anew on each of them.
    """
    configurations = {id(vars(module).get("config")): vars(module).get("config") for module in model.modules()}
    found = [each.__dict__ for each in configurations.values() if isinstance(getattr(each, "__dict__", None), dict)]
    before = [dict(each) for each in found]
    try:
        yield
    finally:
        for each, kept in zip(found, before, strict=True):
            for name in each.keys() - kept.keys():
                del each[name]
            each.update(kept)


def _on_rank_0(world: World, name: str, make: Callable[[], Any], describe: Callable[[Any], bytes]) -> tuple[Any, bytes]:
    """What `make` returns on rank 0 (None on others), and what `describe` says of it, on all ranks. Collective.

    Raises what they raise, on rank 0; UsageError with its text on other ranks.
    """
    result, failure, told = None, None, b""
    if world.rank == 0:
        try:
            result = make()
            told = b"=" + describe(result)
        except Exception as exc:  # code of the user may raise anything
            failure, told = exc, f"{name} failed on rank 0: {type(exc).__name__}: {exc}".encode()
    told = world.broadcast_bytes(told if world.rank == 0 else None)
    if failure is not None:
        raise failure
    if not told.startswith(b"="):
        raise UsageError(told.decode())
    return result, told[1:]


def own_state(
    parameters: Parameters | None, model: nn.Module, *, prefix: str = "", destination: dict[str, Any] | None = None
) -> dict[str, Any]:
    """This rank's part of the model's state, under all tied names; the detached tensors share memory with the model."""
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
    """Load a full state, passed on every rank, into the tensors that each rank holds. Collective.

    Uses the model's own ``load_state_dict``, so that hooks, versions and extra state work. If anything is wrong on any
    rank, all ranks raise a UsageError, and no tensor has changed on any.
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
        if name not in own:
            return torch.zeros(original.shape, dtype=original.dtype)
        return parameters.whole(name, original.detach()).clone()

    try:
        keys, values = _through_model(model, first, memory, state, strict=strict)
    except Exception as exc:  # hooks of the user's modules may raise anything
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


def read_state(
    parameters: Parameters | None, model: nn.Module, state: Mapping[str, Any], *, strict: bool
) -> dict[str, torch.Tensor]:
    """What the model's own ``load_state_dict`` would load of a full state, by first names; the model stays unchanged.

    Raises what hooks and overrides of the user's modules raise.
    """
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(id(tensor), name)

    def memory(_: str, original: torch.Tensor) -> torch.Tensor:
        return torch.zeros(original.shape, dtype=original.dtype)

    if parameters is not None:
        parameters.adopt()
    return dict(_through_model(model, first, memory, state, strict=strict)[1])


def load_later(values: InitialValues, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Use a state as initial values of a model on the meta device, applied when it is deployed; not collective.

    Uses the model's own ``load_state_dict``, whose errors are raised unchanged.
    """
    first: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        first.setdefault(id(tensor), name)

    def memory(name: str, original: torch.Tensor) -> torch.Tensor:
        bare = original.is_meta
        return torch.zeros(original.shape, dtype=original.dtype) if bare else original.detach().clone()

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
    """Run the model's own ``load_state_dict`` on substitute tensors; the model's tensors stay unchanged.

    Args:
        first: First name of each tensor, by its id.
        memory: Allocates a tensor for modules whose loading code may write into their tensors.

    Returns:
        The result of ``load_state_dict``, and the loaded tensors with their first names.

    Raises what hooks and overrides of the user's modules raise; UsageError if a shape would change.
    """
    ensure_here(state, "load_state_dict")
    careful = type(model).load_state_dict is not nn.Module.load_state_dict
    real: dict[str, torch.Tensor] = {}

    def stand_in(place: TensorSlot) -> torch.Tensor | None:
        """A meta tensor, to be replaced by the state's (assign=True); or memory, for modules that write into it."""
        name, original = first[id(place.original)], place.original
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
    """Names of all tensors in the model's state_dict, including all names of shared modules."""
    names = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for entries in (module._parameters, module._buffers):
            for key in entries:
                if entries is module._parameters or key not in module._non_persistent_buffers_set:
                    names.add(f"{path}.{key}" if path else key)
    return names


def _writes(module: nn.Module) -> bool:
    """Whether a module has an override or hooks of `load_state_dict` that may write into its tensors."""
    return (
        type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
        or bool(module._load_state_dict_pre_hooks)
        or bool(module._load_state_dict_post_hooks)
    )


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _detached(state: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Copy of a state with detached tensors and its own metadata, which `load_state_dict` may modify."""
    copied = OrderedDict(
        (name, value.detach() if isinstance(value, torch.Tensor) else value) for name, value in state.items()
    )
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        copied._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]
    return copied
