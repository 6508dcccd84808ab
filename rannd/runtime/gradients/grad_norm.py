"""Norms of gradients over a whole model, although every rank holds its own stage's gradients alone.

``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` are replaced while models are wrapped. They stay what they
are for all parameters but those of models in several stages; for these the ranks put their norms together:

    rank 0   encoder: |g0| ─┐
    rank 1   decoder: |g1| ─┴─► all: (|g0|^p + |g1|^p)^(1/p), and each scales its own gradients by the same factor

A parameter counts once, wherever and however often it is held. A rank that is given no parameter at all takes part as
well: of `[p for n, p in model.named_parameters() if "encoder" in n]` it may hold nothing.
``clip_grad_norm_`` finds torch's function that computes the norm at every call, so names that were imported before the
first wrap (`from torch.nn.utils import clip_grad_norm_`) do the same.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from rannd import patches
from rannd.errors import StepError, UsageError
from rannd.runtime.comm.lockstep import Phase, agree, pack_floats, unpack_floats
from rannd.runtime.comm.world import World
from rannd.runtime.optim.placeholder import is_placeholder
from rannd.runtime.parameters.ownership import Parameters

MOST_MODELS = 60
"""Models in several stages at a time: their places are bits of one number."""
EQUAL = 1e-3
"""Relative difference up to which norms of the same gradients on several ranks count as equal."""
_SMALL = 1e-6
"""What torch adds to a norm before it divides by it."""

Tensors = torch.Tensor | Iterable[torch.Tensor]


class ClippedParameters:
    """One deployed model's parameters, as clipping sees them."""

    def __init__(self, world: World, parameters: Parameters, stages: int) -> None:
        self.world = world
        self.parameters = parameters
        self.stages = stages
        self.names = {id(t): n for n, t in parameters.tensors.items() if isinstance(t, torch.nn.Parameter)}
        self._own = frozenset(parameters.own)

    def waits(self) -> bool:
        """Whether gradients wait for their reduction."""
        aliases = self.parameters.aliases
        return any(aliases[name].grad is not None for name in self.parameters.trainable())

    def own(self, tensor: torch.Tensor) -> bool:
        """Whether this rank holds the parameter."""
        return self.names[id(tensor)] in self._own

    def counts(self, tensor: torch.Tensor) -> bool:
        """Whether it is this rank that counts the parameter, of all that hold it."""
        return self.parameters.slots[self.names[id(tensor)]][0] == self.world.slot

    def whole(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether `given` has all that every rank trains, and no rank trains nothing."""
        mine = {id(self.parameters.tensors[name]) for name in self.parameters.trainable()}
        slots = {
            slot for name, slots in self.parameters.slots.items() if self._trains(name) for slot in slots
        }  # of all ranks
        return len(slots) == self.world.size and mine <= {id(each) for each in given}

    def _trains(self, name: str) -> bool:
        tensor = self.parameters.tensors[name]
        return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad

    def dtype(self) -> torch.dtype:
        """The type of a norm over the model, the same on all ranks."""
        found = torch.float32
        for name, tensor in self.parameters.tensors.items():
            if self._trains(name):
                found = torch.promote_types(found, tensor.dtype)
        return found if found.is_floating_point else torch.float64


_held: list[weakref.ReferenceType[ClippedParameters]] = []
"""Deployed models, in the same order on all ranks."""
_rounds = 0
"""How often ranks have put norms together."""


def enter(held: ClippedParameters) -> None:
    """Let functions of this file know a deployed model, as long as `held` lives or until it leaves."""
    _held.append(weakref.ref(held))


def leave(held: ClippedParameters) -> None:
    """Forget a model."""
    _held[:] = [each for each in _held if each() not in (None, held)]


def _spread() -> list[ClippedParameters]:
    """The models in several stages."""
    return [held for each in _held if (held := each()) is not None and held.stages > 1]


# -- the functions ------------------------------------------------------------------------------------------------


def clip(
    given: Sequence[torch.Tensor], most: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """Scale the gradients of parameters so that their norm over all ranks is at most `most`; the norm before.

    Collective. `given` are parameters of deployed models, and others that have equal gradients on all ranks.
    """
    with torch.no_grad():
        gradients = [parameter.grad for parameter in given if parameter.grad is not None]
        norm = _norm([(parameter, parameter.grad) for parameter in given], norm_type, error_if_nonfinite, foreach)
        factor = float(most) / (float(norm) + _SMALL)
        if not factor >= 1.0 and gradients:  # also where the norm is not a number, as torch does
            if foreach is False:
                for gradient in gradients:
                    gradient.mul_(factor)
            else:
                torch._foreach_mul_(gradients, factor)
    return norm


def _norm(
    given: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """The norm, over all ranks, of (parameter, what is measured of it). Collective."""
    global _rounds
    models = _spread()
    world = models[0].world
    if len(models) > MOST_MODELS:
        raise UsageError(f"{len(models)} wrapped models in several stages; at most {MOST_MODELS} can be clipped")
    mask = 0
    counted: list[torch.Tensor] = []
    local: list[torch.Tensor] = []
    seen: set[int] = set()
    for parameter, tensor in given:
        home = next((place for place, held in enumerate(models) if id(parameter) in held.names), None)
        if home is not None:
            mask |= 1 << home
        if tensor is None or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if home is None:
            local.append(tensor)
        elif models[home].own(parameter) and models[home].counts(parameter):
            counted.append(tensor)
    if local:
        for place, held in enumerate(models):
            if mask >> place & 1 and not held.whole([parameter for parameter, _ in given]):
                raise UsageError(
                    "a norm over some parameters of a model that is wrapped in RaNNCModule together with parameters "
                    "that are not: ranks that hold none of the former could not know. Give all of model.parameters(), "
                    "or clip the two apart"
                )
    _rounds += 1
    waits = any(held.waits() for held in models)
    told = agree(world, Phase.CLIP, _rounds, mask, int(waits))
    if any(each for _, each in told):
        raise StepError(
            "gradients wait for their reduction (delay_grad_allreduce(True)): call model.allreduce_grads(), or run a "
            "backward with the delay off, before their norm is taken"
        )
    everyone = functools.reduce(int.__or__, (each for each, _ in told))
    numbers = (
        bool(counted),
        _plain_norm(counted, norm_type, foreach),
        bool(local),
        _plain_norm(local, norm_type, foreach),
    )
    rows = [unpack_floats(row) for row in world.gather_numbers(pack_floats(numbers))]
    norms = [norm for has, norm, _, _ in rows if has] + _agreed(rows)
    found = float(_combined(norms, norm_type))
    if error_if_nonfinite and not math.isfinite(found):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    members = [held for place, held in enumerate(models) if everyone >> place & 1] or models
    dtype = functools.reduce(torch.promote_types, (held.dtype() for held in members))
    return torch.tensor(found, dtype=dtype, device=world.device)


def _plain_norm(tensors: Sequence[torch.Tensor], norm_type: float, foreach: bool | None) -> float:
    """The norm of tensors that are here, in at least 32 bits."""
    if not tensors:
        return 0.0
    wide = [tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor for tensor in tensors]
    with directly():
        return float(clip_grad._get_total_norm(wide, norm_type, False, foreach).double())


def _agreed(rows: Sequence[Sequence[float]]) -> list[float]:
    """The norm of what ranks have beside wrapped models, once; UsageError where it differs."""
    told = [(rank, norm) for rank, (_, _, has, norm) in enumerate(rows) if has]
    if not told:
        return []
    (first, norm) = told[0]
    for rank, other in told[1:]:
        if not (abs(other - norm) <= EQUAL * abs(norm) or other == norm or (math.isnan(other) and math.isnan(norm))):
            raise UsageError(
                f"a norm over a wrapped model and other parameters, whose gradients differ between ranks (their norm "
                f"is {norm:.6g} on rank {first}, {other:.6g} on rank {rank}): stages would be scaled by different "
                "factors. Clip the two apart, or make the others equal (DistributedDataParallel)"
            )
    return [norm]


def _combined(norms: Sequence[float], norm_type: float) -> torch.Tensor:
    """The norm of a vector from the norms of its parts."""
    if not norms:
        return torch.tensor(0.0, dtype=torch.float64)
    parts = torch.tensor(list(norms), dtype=torch.float64)
    # torch counts the tensors that are not zero
    return parts.sum() if norm_type == 0 else torch.linalg.vector_norm(parts, norm_type)


# -- in torch's place ---------------------------------------------------------------------------------------------

_depth = 0


@contextlib.contextmanager
def directly() -> Iterator[None]:
    """Let torch's functions see this rank's tensors alone."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return [tensor for tensor in given if not is_placeholder(tensor)]  # other ranks have none


def _concerned(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a norm over parameters is one over several ranks."""
    models = _spread()
    if not models or _depth:
        return False
    return not parameters or any(id(parameter) in held.names for held in models for parameter in parameters)


def _refuse_waiting(parameters: Sequence[torch.Tensor]) -> None:
    """StepError where gradients of a model in one stage wait."""
    for each in _held:
        held = each()
        if held is not None and held.stages == 1 and any(id(p) in held.names for p in parameters) and held.waits():
            raise StepError(
                "gradients wait for their reduction (delay_grad_allreduce(True)): call model.allreduce_grads(), or run "
                "a backward with the delay off, before they are clipped"
            )


def _clip_grad_norm_(
    original: Callable[..., torch.Tensor],
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = _listed(parameters)
    if not _depth and _concerned(given):
        return clip(given, max_norm, float(norm_type), error_if_nonfinite, foreach)
    if not _depth:
        _refuse_waiting(given)
    with directly():
        return original(given, max_norm, norm_type, error_if_nonfinite, foreach)


def _get_total_norm(
    original: Callable[..., torch.Tensor],
    tensors: Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = _listed(tensors)
    models = [] if _depth else _spread()
    if models:
        owners = {id(p.grad): p for held in models for p in held.parameters.tensors.values() if p.grad is not None}
        pairs = [(owners.get(id(tensor), tensor), tensor) for tensor in given]
        if _concerned([parameter for parameter, _ in pairs]):
            with torch.no_grad():
                return _norm(pairs, float(norm_type), error_if_nonfinite, foreach)
    return original(given, norm_type, error_if_nonfinite, foreach)


_WHY = "a rank alone knows the norm of its own stage's gradients"
_PLACES = {
    patches.declare(f"{module.__name__}.{name}", module, name, _WHY): function
    for module, name, function in (
        (clip_grad, "_get_total_norm", _get_total_norm),
        (utils, "get_total_norm", _get_total_norm),
        (clip_grad, "clip_grad_norm_", _clip_grad_norm_),
        (utils, "clip_grad_norm_", _clip_grad_norm_),
    )
}


def install() -> None:
    """Put this file's functions in the place of torch's, once."""
    patches.install(*(patch.around(function) for patch, function in _PLACES.items()))


def remove() -> None:
    """Give torch its functions back."""
    patches.remove(*_PLACES)
