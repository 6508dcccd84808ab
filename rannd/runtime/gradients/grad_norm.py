"""Computes gradient norms over the whole model, although each rank holds only its own stage's gradients.

``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` are patched while models are wrapped. The patches change
nothing except for parameters of models with several stages, for which ranks combine their norms:

    rank 0   encoder: |g0| ─┐
    rank 1   decoder: |g1| ─┴─► all: (|g0|^p + |g1|^p)^(1/p), and each scales its own gradients by the same factor

A parameter counts once, even if several ranks hold it. A rank takes part even if it passes no parameters: of
`[p for n, p in model.named_parameters() if "encoder" in n]` it may hold none.
``clip_grad_norm_`` looks up torch's function that computes the norm in each call, which is patched as well, so names
imported before the first wrap (`from torch.nn.utils import clip_grad_norm_`) behave the same.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import utils
from torch.nn.utils import clip_grad

from rannd import patches
from rannd.device.reads import read
from rannd.errors import StepError, UsageError
from rannd.runtime.comm.lockstep import Phase, agree, pack_floats, unpack_floats
from rannd.runtime.comm.world import World
from rannd.runtime.failure.nan_check import is_finite
from rannd.runtime.gradients.scaling import scale_
from rannd.runtime.optim.placeholder import is_placeholder
from rannd.runtime.parameters.absent import gradient_reads
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.zero.tensor_piece import TensorPiece, flat_part

MOST_MODELS = 60
"""Maximum number of deployed models with several stages: each is a bit of one integer of a message."""
EQUAL = 1e-3
"""Relative tolerance for norms of the same gradients on several ranks."""
_SMALL = 1e-6
"""Number that torch adds to a norm before dividing by it."""

Tensors = torch.Tensor | Iterable[torch.Tensor]


class ClippedParameters:
    """Parameters of one deployed model, for gradient clipping."""

    def __init__(self, world: World, parameters: Parameters, *, over_ranks: bool) -> None:
        self.world = world
        self.parameters = parameters
        self.over_ranks = over_ranks
        """Whether ranks have different gradients: of several stages, or pieces of them (ZeRO 2 and 3)."""
        self.names = {id(t): n for n, t in parameters.tensors.items() if isinstance(t, torch.nn.Parameter)}
        self._own = frozenset(parameters.own)

    def own(self, tensor: torch.Tensor) -> bool:
        """Whether this rank holds the parameter."""
        return self.names[id(tensor)] in self._own

    def counts(self, tensor: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether this rank, of all that hold the parameter, adds what it has of its gradient to the norm."""
        return isinstance(gradient, TensorPiece) or self.parameters.slots[self.names[id(tensor)]][0] == self.world.slot

    def whole(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether `given` has all trainable parameters of this rank, and every rank has trainable parameters."""
        mine = {id(self.parameters.tensors[name]) for name in self.parameters.trainable()}
        slots = {
            slot for name, slots in self.parameters.slots.items() if self._trains(name) for slot in slots
        }  # of all ranks
        return len(slots) == self.world.size and mine <= {id(each) for each in given}

    def _trains(self, name: str) -> bool:
        tensor = self.parameters.tensors[name]
        return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad

    def dtype(self) -> torch.dtype:
        """Dtype of a norm over the model, the same on all ranks."""
        found = torch.float32
        for name, tensor in self.parameters.tensors.items():
            if self._trains(name):
                found = torch.promote_types(found, tensor.dtype)
        return found if found.is_floating_point else torch.float64


_held: list[weakref.ReferenceType[ClippedParameters]] = []
"""Deployed models, in the same order on all ranks."""
_rounds = 0
"""Number of norms computed over several ranks so far."""


def enter(held: ClippedParameters) -> None:
    """Register a deployed model, until `leave` or until `held` is garbage-collected."""
    _held.append(weakref.ref(held))


def leave(held: ClippedParameters) -> None:
    """Unregister a model."""
    _held[:] = [each for each in _held if each() not in (None, held)]


def _divided_models() -> list[ClippedParameters]:
    """Registered models whose ranks have different gradients."""
    return [held for each in _held if (held := each()) is not None and held.over_ranks]


# -- the functions ------------------------------------------------------------------------------------------------


def clip_grad_norm_(
    given: Sequence[torch.Tensor], most: float, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> torch.Tensor:
    """Scale the gradients of parameters so that their norm over all ranks is at most `most`. Collective.

    `given` are parameters of deployed models, and others that have equal gradients on all ranks. Returns the norm
    before scaling.
    """
    with torch.no_grad():
        gradients = [flat_part(parameter.grad) for parameter in given if parameter.grad is not None]
        norm = _norm([(parameter, parameter.grad) for parameter in given], norm_type, error_if_nonfinite, foreach)
        if _divided_models()[0].world.reads.late:
            wide = norm.double() + _SMALL
            coefficient = torch.full_like(wide, float(most)) / wide
            scale_(gradients, torch.where(coefficient >= 1.0, 1.0, coefficient))
            return norm
        factor = float(most) / (float(read(norm)) + _SMALL)
        if not factor >= 1.0 and gradients:  # also if the norm is NaN, as torch does
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
    """Norm over all ranks of the tensors in pairs (parameter, tensor), such as its gradient. Collective."""
    global _rounds
    models = _divided_models()
    world = models[0].world
    if len(models) > MOST_MODELS:
        raise UsageError(
            f"there are {len(models)} wrapped models with several stages; gradients of at most {MOST_MODELS} can be "
            "clipped"
        )
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
        elif models[home].own(parameter) and models[home].counts(parameter, tensor):
            flat = flat_part(tensor)
            if flat.numel() or flat is tensor:  # torch has no infinity norm of a piece without elements
                counted.append(flat)
    if local:
        for place, held in enumerate(models):
            if mask >> place & 1 and not held.whole([parameter for parameter, _ in given]):
                raise UsageError(
                    "a norm over some parameters of a model wrapped in RaNNCModule together with parameters outside "
                    "of it is not supported: ranks that hold none of the former would not take part. Pass all of "
                    "model.parameters(), or clip the two separately"
                )
    _rounds += 1
    waits = any(held.parameters.waits for held in models)
    told = agree(world, Phase.CLIP, _rounds, mask, int(waits), int(bool(counted)), int(bool(local)))
    if any(each for _, each, _, _ in told):
        raise StepError(
            "gradients were not reduced yet (delay_grad_allreduce(True)): call model.allreduce_grads(), or run a "
            "backward with the delay off, before computing their norm"
        )
    everyone = functools.reduce(int.__or__, (each for each, _, _, _ in told))
    norms = _of_all(world, [_plain_norm(each, norm_type, foreach, world.device) for each in (counted, local)])
    terms = [norms[rank, 0] for rank, (_, _, counts, _) in enumerate(told) if counts]
    others = [rank for rank, (_, _, _, has) in enumerate(told) if has]
    if others:
        terms.append(norms[others[0], 1])
        world.reads.add(torch.stack([norms[rank, 1] for rank in others]), functools.partial(_ensure_equal, others))
    found = _combined(terms, norm_type, norms.device)
    if error_if_nonfinite and not is_finite(found):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    members = [held for place, held in enumerate(models) if everyone >> place & 1] or models
    dtype = functools.reduce(torch.promote_types, (held.dtype() for held in members))
    return found.to(world.device, dtype)


def _of_all(world: World, norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Norms of all ranks, one row per rank; on the device where values are read late. Collective."""
    if world.reads.late:
        return world.share_values(torch.stack(list(norms)))
    rows = world.gather_numbers(pack_floats(read(torch.stack(list(norms))).tolist()))
    return torch.tensor([unpack_floats(row) for row in rows], dtype=torch.float64)


def _plain_norm(
    tensors: Sequence[torch.Tensor], norm_type: float, foreach: bool | None, device: torch.device
) -> torch.Tensor:
    """Norm of local tensors, computed in at least float32; float64 on the device."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    wide = [tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor for tensor in tensors]
    with directly():
        return clip_grad._get_total_norm(wide, norm_type, False, foreach).to(device, torch.float64)


def _ensure_equal(ranks: Sequence[int], norms: Sequence[float]) -> None:
    """UsageError if the norm of the gradients outside wrapped models differs between the ranks that have some."""
    (first, norm), *told = zip(ranks, norms, strict=True)
    for rank, other in told:
        if not (abs(other - norm) <= EQUAL * abs(norm) or other == norm or (math.isnan(other) and math.isnan(norm))):
            raise UsageError(
                f"a norm over a wrapped model and other parameters whose gradients differ between ranks (their norm "
                f"is {norm:.6g} on rank {first}, {other:.6g} on rank {rank}) would scale stages by different factors. "
                "Clip the two separately, or make the other gradients equal (DistributedDataParallel)"
            )


def _combined(norms: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Norm of a vector, from the norms of its parts."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    parts = torch.stack(list(norms))
    # for norm_type 0 torch counts the tensors that are not zero
    return parts.sum() if norm_type == 0 else torch.linalg.vector_norm(parts, norm_type)


# -- patches of torch's functions ---------------------------------------------------------------------------------

_depth = 0


@contextlib.contextmanager
def directly() -> Iterator[None]:
    """Context manager in which the patched functions behave as torch's own, on this rank's tensors only."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return [tensor for tensor in given if not is_placeholder(tensor)]  # a placeholder is no parameter of the model


def _spans_ranks(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether a norm over these parameters has to be computed over several ranks."""
    models = _divided_models()
    if not models or _depth:
        return False
    return not parameters or any(id(parameter) in held.names for held in models for parameter in parameters)


def _refuse_waiting(parameters: Sequence[torch.Tensor], *, divided: bool = False) -> None:
    """StepError if gradients of a model with a single stage were not reduced yet; `divided`: or with several."""
    for each in _held:
        held = each()
        if held is None or (held.over_ranks and not divided):
            continue
        if held.parameters.waits and any(id(p) in held.names for p in parameters):
            raise StepError(
                "gradients were not reduced yet (delay_grad_allreduce(True)): call model.allreduce_grads(), or run "
                "a backward with the delay off, before clipping them"
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
    if not _depth and _spans_ranks(given):
        return clip_grad_norm_(given, max_norm, float(norm_type), error_if_nonfinite, foreach)
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
    models = [] if _depth else _divided_models()
    if models:
        owners = {id(p.grad): p for held in models for p in held.parameters.tensors.values() if p.grad is not None}
        pairs = [(owners.get(id(tensor), tensor), tensor) for tensor in given]
        if _spans_ranks([parameter for parameter, _ in pairs]):
            gradient_reads.forgive()
            with torch.no_grad():
                return _norm(pairs, float(norm_type), error_if_nonfinite, foreach)
    return original(given, norm_type, error_if_nonfinite, foreach)


def _clip_grad_value_(original: Callable[..., None], parameters: Tensors, *args: Any, **kwargs: Any) -> None:
    listed = _listed(parameters)
    _refuse_waiting(listed, divided=True)
    given = [parameter for parameter in listed if parameter.grad is not None]
    if given or not _divided_models():  # torch fails without gradients, but a rank may have none
        original(given, *args, **kwargs)


_WHY = "each rank can compute only the norm of its own stage's gradients"
_PLACES = {
    patches.declare(f"{module.__name__}.{name}", module, name, _WHY): function
    for module, name, function in (
        (clip_grad, "_get_total_norm", _get_total_norm),
        (utils, "get_total_norm", _get_total_norm),
        (clip_grad, "clip_grad_norm_", _clip_grad_norm_),
        (utils, "clip_grad_norm_", _clip_grad_norm_),
        (clip_grad, "clip_grad_value_", _clip_grad_value_),
        (utils, "clip_grad_value_", _clip_grad_value_),
    )
}


def install() -> None:
    """Patch torch's functions, until `remove`; patches that are already installed are kept."""
    patches.install(*(patch.around(function) for patch, function in _PLACES.items()))


def remove() -> None:
    """Restore torch's functions."""
    patches.remove(*_PLACES)
