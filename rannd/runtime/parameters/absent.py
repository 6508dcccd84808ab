"""Absent tensors: parameters and buffers of the model that other ranks hold.

An absent tensor stays the same object, with shape, dtype, device, requires_grad and grad, but has no values: every
operation that would read or write them raises a UsageError that names the tensor, its stage and its rank. The
operations that make a new tensor like it (``torch.zeros_like``) work. Its gradient is None, as that of an unused
parameter: a script that reads it is told once, because a norm that it computes would be that of one stage.
Where the replicas of a stage share a parameter (ZeRO 3), it is absent on each, but has a *part*, which operations take
in its place, and a gradient.

It is a tensor subclass without storage: the object's implementation is exchanged (as by torch.utils.swap_tensors, see
`tensor_swap`), and its class becomes a subclass of its own class, so that ``isinstance`` still holds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from rannd import log, patches
from rannd.errors import UsageError, advice_for_caller
from rannd.graph.fingerprint.state_rules import STANDS_FOR
from rannd.runtime.parameters.tensor_swap import exchange_below_hooks
from rannd.runtime.parameters.valueless import Valueless, needs_values, refuse

_KINDS = ("empty", "zeros", "ones", "full", "rand", "randn", "randint", "tensor")
_LIKE = {*(f"{kind}_like" for kind in _KINDS), *(f"new_{kind}" for kind in _KINDS)}
"""Functions that make a new tensor of the same kind."""

_ANY_ADVICE = (
    "Call the RaNNCModule, not the model inside it, to compute; its state_dict(), load_state_dict(), get_param(name) "
    "or undeploy(), called on all ranks, reach the values of other ranks; pyrannc.AveragedModel averages; "
    "model.parameters(own=True) are those of this rank alone"
)
_ADVICE = {
    ("torch.nn.parallel.distributed", "__init__"): (
        "A RaNNCModule averages gradients over all ranks itself: use it without DistributedDataParallel of the model "
        "inside it"
    ),
    ("torch.optim.swa_utils", "__init__"): "Use pyrannc.AveragedModel(model) of the RaNNCModule",
    ("copy", "deepcopy"): (
        "For its values call model.state_dict() of the RaNNCModule on all ranks; for averages use "
        "pyrannc.AveragedModel(model); to copy the model, do so before its first call, or after model.undeploy() on "
        "all ranks"
    ),
    ("", "save_pretrained"): (
        "Call model.save_pretrained(..) of the RaNNCModule, not of the model inside it, on all ranks: it writes the "
        "whole model, once"
    ),
    ("transformers.generation", "generate"): (
        "generate() of a model with an encoder calls that by itself, past the plan: call model.undeploy() on all "
        "ranks, then each may call model.module.generate(..); the next training step deploys the model again"
    ),
    ("torch.nn.modules.module", "load_state_dict"): (
        "Call model.load_state_dict(state) of the RaNNCModule, not of the model inside it, on all ranks, with the "
        "whole state on each"
    ),
}
"""What to do instead of calls of other libraries with the model inside a RaNNCModule (see `advice_for_caller`)."""


@dataclass(frozen=True)
class _Absence:
    """What is known of an absent tensor."""

    holder: str
    """Name, stage and rank, for messages."""
    kept: torch.Tensor
    """Holds the implementation that the object had: without memory, but for integers."""
    kind: type[torch.Tensor]
    """Class that the object had."""
    part: torch.Tensor | None = None
    """What operations take in its place: a tensor of its shape, made of what this rank has of it."""


class _Absent(Valueless):
    """Mixin of the classes of absent tensors."""

    _rannd_absence: _Absence

    def refusal(self, what: str) -> Exception:
        return UsageError(
            f"{what} needs the values of {self._rannd_absence.holder}: this rank does not have them. "
            f"{advice_for_caller(_ADVICE, _ANY_ADVICE)}"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if needs_values(func) and any(map(_has_part, (*args, *(kwargs or {}).values()))):
            if func is torch.autograd.grad:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            if name == "__set__":  # of .data
                args[0].detach().copy_(args[1])
                return None
            return func(*map(_of_part, args), **{key: _of_part(value) for key, value in (kwargs or {}).items()})
        if func == _READ_GRADIENT and part_of(args[0]) is None:
            gradient_reads.note(sys._getframe(1), args[0])
        if name == "__get__" and sys._getframe(1).f_code is nn.Module._load_from_state_dict.__code__:
            # It looks at the shape before it copies, and would repeat the error of copying for each tensor.
            refuse("load_state_dict", args)
        if name in _LIKE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*map(_kept, args), **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(_has_part, (*args, *(kwargs or {}).values()))):
            return func(*map(_of_part, args), **{key: _of_part(value) for key, value in (kwargs or {}).items()})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, **_: Any) -> str:
        made: Any = self
        absence = self._rannd_absence
        return f"{absence.kind.__name__}({made.dtype}, {tuple(made.shape)}, values of {absence.holder})"


def is_absent(tensor: torch.Tensor) -> bool:
    """Whether other ranks hold this tensor's values, or a part of them."""
    return isinstance(tensor, _Absent)


def part_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What this rank has of an absent tensor; None if nothing, or if it has all."""
    return tensor._rannd_absence.part if isinstance(tensor, _Absent) else None


def _has_part(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_part, value))
    return isinstance(value, torch.Tensor) and part_of(value) is not None


def _of_part(value: Any) -> Any:
    """The value with parts in place of tensors that have one."""
    if isinstance(value, list | tuple):
        return type(value)(map(_of_part, value)) if _has_part(value) else value
    part = part_of(value) if isinstance(value, torch.Tensor) else None
    return value if part is None else part


_SCRIPT = patches.declare(
    "TorchScript", torch.jit, "script", "native code copies parameters, and reads those of other ranks as zeros"
)


def install() -> None:
    """Make torch.jit.script of absent tensors an error, until `remove`."""
    patches.install(_SCRIPT.around(_scripted))


def remove() -> None:
    """Restore torch's function."""
    patches.remove(_SCRIPT)
    gradient_reads.clear()


_READ_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]


_RIGHT_OVER_STAGES = ("accelerate", "pyrannc", "rannd", "torch")
"""Libraries whose loops over gradients treat each by itself, or call torch's functions for norms."""


class GradientReads:
    """Places in the script that read the gradient of an absent tensor since the last call of the model."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything, also that a place was told."""
        self._found = ""
        self._told = False

    def note(self, frame: FrameType, tensor: torch.Tensor) -> None:
        """The code of `frame` reads the gradient of `tensor`."""
        if self._told or self._found:
            return
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _RIGHT_OVER_STAGES:
            holder = tensor._rannd_absence.holder  # type: ignore[attr-defined]
            self._found = (
                f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} reads the gradient of {holder}"
            )

    def forgive(self) -> None:
        """The script gives its gradients to a function of torch that is right over all stages."""
        self._found = ""

    def tell(self) -> None:
        """Warn of the first place, once."""
        if self._found:
            log.get("RaNNCModule").warning(
                "%s: it is None here, as those of all parameters of other stages. A norm over the gradients that are "
                "not None is the norm of this rank's stage; model.calc_grad_norm(), on all ranks, is that of the whole "
                "model. In a loop that treats each parameter by itself use model.parameters(own=True) (logged once)",
                self._found,
            )
            self._found, self._told = "", True


gradient_reads = GradientReads()


def _scripted(original: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    for tensor in (*obj.parameters(), *obj.buffers()) if isinstance(obj, nn.Module) else ():
        if isinstance(tensor, _Absent):
            raise tensor.refusal("torch.jit.script")
    return original(obj, *args, **kwargs)


def make_absent(tensor: torch.Tensor, kept: torch.Tensor, holder: str, part: torch.Tensor | None = None) -> None:
    """Make a tensor absent; its gradient is dropped, unless it has a part.

    Args:
        tensor: The tensor; not absent.
        kept: What `make_present` without a value gives back; of the same shape and dtype.
        holder: Name, stage and rank, for messages.
        part: What this rank has of it.
    """
    kind, gradient = type(tensor), tensor.grad
    impl: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        _class_for(torch.Tensor),
        tensor.shape,
        strides=tensor.stride(),
        dtype=tensor.dtype,
        device=kept.device,
        requires_grad=tensor.requires_grad,
    )
    # Once set it no longer follows the dtype, which a script may change after undeploying.
    if tensor.is_leaf and tensor.is_floating_point() and tensor.grad_dtype != tensor.dtype:
        impl.grad_dtype = tensor.grad_dtype
    tensor.grad = None
    tensor.data = kept
    exchange_below_hooks(tensor, impl)
    impl.__class__ = torch.Tensor
    tensor.__class__ = _class_for(kind)
    tensor._rannd_absence = _Absence(holder, impl, kind, part)  # type: ignore[attr-defined]
    if part is not None:
        tensor.grad = gradient


def make_present(tensor: torch.Tensor) -> None:
    """Undo `make_absent`: the tensor is what was kept of it. No-op for other tensors."""
    if not is_absent(tensor):
        return
    absence: _Absence = tensor.__dict__.pop("_rannd_absence")
    requires_grad = tensor.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        gradient = tensor.grad
    tensor.__class__ = absence.kind
    exchange_below_hooks(tensor, absence.kept)
    tensor.requires_grad_(requires_grad)
    tensor.grad = gradient


@contextlib.contextmanager
def all_present(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, absent tensors are what was kept of them."""
    absences = [(tensor, tensor._rannd_absence) for tensor in tensors if is_absent(tensor)]  # type: ignore[attr-defined]
    try:
        for tensor, _ in absences:
            make_present(tensor)
        yield
    finally:
        for tensor, absence in absences:
            make_absent(tensor, tensor.data, absence.holder, absence.part)


@functools.cache
def _class_for(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    entries = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, STANDS_FOR: kind}
    return type(kind.__name__, (_Absent, kind), entries)


def _kept(value: Any) -> Any:
    return value._rannd_absence.kept.detach() if isinstance(value, _Absent) else value
