"""DistributeModelParams: deferred initialization of models that are too large for one rank.

The operators of the unmodified constructor are recorded without allocating tensors
(rannd.runtime.parameters.op_recorder); at the first call of the wrapped model each rank replays those that its stage's
tensors depend on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration
from torch.utils.weak import WeakTensorKeyDictionary

from rannd import config as configuration
from rannd import log
from rannd.errors import UsageError
from rannd.patches import declare, declare_hook, patched
from rannd.runtime.comm import process_flags
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.comm.world import World, current
from rannd.runtime.failure.user_traceback import shorten_tracebacks
from rannd.runtime.parameters.op_recorder import Recorder
from rannd.runtime.parameters.op_tape import View

_REGISTRATIONS = tuple(
    declare_hook(register.__name__, register, "the modules that a constructor makes")
    for register in (
        registration.register_module_parameter_registration_hook,
        registration.register_module_buffer_registration_hook,
        registration.register_module_module_registration_hook,
    )
)


_CONSTRUCTION = declare("nn.Module.__init__", nn.Module, "__init__", "what registers nothing may have tensors, too")


@dataclass(frozen=True)
class Recipe:
    """Recording from which a parameter or buffer can be materialized."""

    recorder: Recorder
    view: View
    version: int
    """The tensor's version counter when the recording ended."""


_recipes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, Recipe]] = weakref.WeakKeyDictionary()
_recorders: weakref.WeakKeyDictionary[nn.Module, Recorder] = weakref.WeakKeyDictionary()


def recipes_of(model: nn.Module) -> dict[int, Recipe]:
    """Recipes of a model's parameters and buffers built under DistributeModelParams, by tensor id."""
    found: dict[int, Recipe] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter in _recipes:
                found[id(parameter)] = _recipes[parameter]
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer in _recipes:
                found[id(buffer)] = _recipes[buffer]
            elif buffer.is_meta and name in _buffers.get(module, {}):  # replaced by `.double()`, `.to(...)`
                recipe = _buffers[module][name]
                found.setdefault(id(buffer), Recipe(recipe.recorder, recipe.view, buffer._version))
    return found


def recorders_of(model: nn.Module) -> list[Recorder]:
    """Recorders of the constructors of a model's modules, in the model's order."""
    return list(dict.fromkeys(each for module in model.modules() if (each := _recorders.get(module)) is not None))


def forget(model: nn.Module) -> None:
    """Drop the recordings of a model whose tensors have their values."""
    for module in model.modules():
        _recorders.pop(module, None)
        _buffers.pop(module, None)
    for tensor in (*model.parameters(), *model.buffers()):
        _recipes.pop(tensor, None)


def draw_seed(world: World) -> int:
    """Draw a seed for all ranks from rank 0's default generator. Collective."""
    meet(world, Phase.DISTRIBUTE)
    drawn = int(torch.randint(2**62, ()))
    return int.from_bytes(world.broadcast_bytes(drawn.to_bytes(8, "big")), "big")


class DistributeModelParams(contextlib.ContextDecorator):
    """Context manager to build a model that is larger than the memory of one rank.

    ``with pyrannc.DistributeModelParams(): model = Net()`` runs the unmodified constructor, but the tensors that it
    creates get no memory: after the block they are on the meta device. At the first call of the `RaNNCModule` every
    rank materializes the tensors of its stage, one at a time, with the values that the constructor gives them. Random
    values use seeds derived from rank 0's generator (at the start of the block) and the names of the parameters, so
    they do not depend on the number of ranks or on the plan.

    All ranks must enter the block. Parameters must be written inside the block: afterwards they have no memory (an
    error at the first call names the parameter). Tensors created from NumPy arrays or Python lists keep their values
    in memory, on every rank.

    Args:
        enable: If False, the block does nothing.
    """

    def __init__(self, enable: bool = True) -> None:
        self._enable = bool(enable)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> DistributeModelParams:
        if not self._enable or process_flags.building:  # nested: the outer block records everything
            return self
        shorten_tracebacks()
        config = configuration.load()
        log.setup(level=config.log_level)
        recorder = Recorder(draw_seed(current(config)))
        with contextlib.ExitStack() as stack:
            roots = stack.enter_context(_watched())
            stack.callback(_register, roots, recorder)
            stack.enter_context(recorder.recording())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()


@contextlib.contextmanager
def _watched() -> Iterator[weakref.WeakSet[nn.Module]]:
    """Collect the modules that are made, or register parameters, buffers or submodules, inside the block."""
    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def look(module: nn.Module, name: str, value: Any) -> None:
        seen.add(module)

    def made(original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        seen.add(module)

    with patched(_CONSTRUCTION.around(made), *(hook.by(look) for hook in _REGISTRATIONS)):
        process_flags.building = True
        try:
            yield seen
        finally:
            process_flags.building = False


def _register(roots: weakref.WeakSet[nn.Module], recorder: Recorder) -> None:
    for root in list(roots):
        for module in root.modules():  # includes copies of modules, which do not trigger the registration hooks
            _recorders[module] = recorder
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                view = recorder.view(tensor) if tensor is not None else None
                if tensor is not None and view is not None and tensor not in _recipes:
                    _recipes[tensor] = Recipe(recorder, view, tensor._version)
            made = {
                name: _recipes[each] for name, each in module._buffers.items() if each is not None and each in _recipes
            }
            if made:
                _buffers[module] = made


def check_unchanged(name: str, tensor: torch.Tensor, recipe: Recipe) -> None:
    """UsageError if a tensor was written after its recording, or has another shape."""
    if tensor._version != recipe.version:
        raise UsageError(
            f"{name} was written after the block of DistributeModelParams in which it was made; that is lost, because "
            "it has no memory there: initialise the model inside of the block"
        )
    if tuple(tensor.shape) != recipe.view.size:
        raise UsageError(
            f"{name} had shape {recipe.view.size} when the block of DistributeModelParams ended, and has "
            f"{tuple(tensor.shape)} now; change shapes inside of the block"
        )
