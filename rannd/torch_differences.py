"""What differs between the versions of torch that are supported, 2.11 to 2.15.

Each function and constant says from which version on, or until which, torch is at fault, and how. What it does is right
with later versions, too: there it is not needed. Everything else reads the same in all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

VERSION: tuple[int, int] = tuple(map(int, torch.__version__.split(".")[:2]))  # type: ignore[assignment]
"""Major and minor version of the torch that runs; a development version counts as what it will be."""

ADAGRAD_BEGINS_AT_ONCE = VERSION < (2, 12)
"""In 2.11 Adagrad gives parameters their state when it is made, and cannot step one that it gets later; from 2.12 on
it does so in the first step."""

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""The kernels that torch traces through, where it follows an operator made of others; nothing else runs them."""


def override_fake(name: str, kernel: Callable[..., Any]) -> None:
    """Register a kernel for fake tensors in place of torch's own.

    2.11 refuses that unless it is told to; later versions take it by default.
    """
    torch.library.register_fake(name, kernel, allow_override=True)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """What has to be in place while a model is traced, and must not be while it runs.

    Until 2.12 ``F.binary_cross_entropy`` with weights computes a shape in C++ (``_infer_size``), which takes no symbol
    for a size: the number of rows would be fixed. From 2.13 on it is ``broadcast_shapes``, as here; torch.jit, which
    compiles the other, cannot compile this.
    """
    functional: Any = torch.nn.functional
    before = vars(functional).get("_infer_size")
    if before is None:
        yield
        return
    functional._infer_size = torch.broadcast_shapes
    try:
        yield
    finally:
        functional._infer_size = before


@contextlib.contextmanager
def no_recomputing() -> Iterator[None]:
    """Run what the user checkpoints (not reentrant) without it, where torch could not trace it otherwise.

    2.11 keeps the inputs of a checkpoint by an autograd.Function of its own, and looks for them in the autograd graph
    of real tensors, which traced ones do not have. Until 2.12 the hooks of a checkpoint stay in place where an
    exception leaves it, as in a trace that fails: what the model saves for backward later would be recomputed from
    traced tensors. Later versions trace through a checkpoint.
    """
    if VERSION >= (2, 13):
        yield
        return
    checkpoint: Any = torch.utils.checkpoint
    before = getattr(checkpoint, "_checkpoint_without_reentrant_generator", None)
    if before is None:
        raise RuntimeError(
            f"torch {torch.__version__} cannot trace through a checkpoint, and torch.utils.checkpoint has no "
            "_checkpoint_without_reentrant_generator to leave it out by; use torch 2.13 or later"
        )

    def directly(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    checkpoint._checkpoint_without_reentrant_generator = directly
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = before


def mend_kernels() -> None:
    """Mend what versions of torch say of operators while they are traced: shapes, types, and what they refuse."""
    if VERSION < (2, 13):
        override_fake("aten::embedding", _embedding)
        _mend_lstm()
        torch.ops.aten.cross_entropy_loss.default.py_impl(_COMPOSITE)(_cross_entropy_loss)
    if VERSION < (2, 12):
        for name in ("quantile", "nanquantile"):
            for overload in ("default", "scalar"):
                operator = getattr(getattr(torch.ops.aten, name), overload)
                operator.py_impl(_COMPOSITE)(_quantile if name == "quantile" else _nanquantile)
        _mend_unique()


def _embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Until 2.12 an embedding of floating-point numbers can be traced, and fails when it runs."""
    torch._check(
        indices.dtype in (torch.int64, torch.int32),
        lambda: (
            f"Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but "
            f"got {indices.dtype} instead"
        ),
    )
    torch._check(weight.dim() == 2, lambda: "'weight' must be 2-D")
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _mend_lstm() -> None:
    """Until 2.12 the last states of an LSTM have one dimension too many while it is traced: the dimension of the
    samples is squeezed in place of the one in front of it."""
    decompositions: Any = torch._decomp.decompositions
    own = decompositions.one_layer_lstm

    def one_layer_lstm(inp: Any, hidden: Any, params: Any, has_biases: bool, reverse: bool = False) -> Any:
        out, last = own(inp, hidden, params, has_biases, reverse=reverse)
        return out, tuple(state.reshape(given.shape) for state, given in zip(last, hidden, strict=True))

    decompositions.one_layer_lstm = one_layer_lstm


def _cross_entropy_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Until 2.12 targets that are probabilities fix the number of samples: sizes of tensors are asked for as numbers.
    What this does is what torch's own kernel does (aten/src/ATen/native/LossNLL.cpp)."""
    if self.dim() != target.dim() or self.shape != target.shape:  # classes
        operator: Any = torch.ops.aten.cross_entropy_loss.default
        loss: torch.Tensor = operator._op_dk(_COMPOSITE, self, target, weight, reduction, ignore_index, label_smoothing)
        return loss
    torch._check(target.is_floating_point(), lambda: f"Expected floating point type for target, got {target.dtype}")
    torch._check(ignore_index < 0, lambda: "ignore_index is not supported for floating point target")
    place = 0 if self.dim() == 1 else 1
    classes = self.shape[place]
    if label_smoothing > 0:
        torch._check(label_smoothing <= 1, lambda: f"label_smoothing must be in [0, 1]. Got: {label_smoothing}")
        target = target * (1 - label_smoothing) + label_smoothing / classes
    terms = self.log_softmax(place, self.dtype) * target
    if weight is not None:
        torch._check(
            weight.dim() == 1 and weight.shape[0] == classes,
            lambda: f"weight tensor should be defined either for all {classes} classes or no classes",
        )
        terms = terms * weight.reshape(-1, *[1] * (self.dim() - place - 1))
    if reduction == 0:
        return -terms.sum(place)
    return -terms.sum() if reduction == 2 else -terms.sum() / (self.numel() // classes)


def _quantile(
    self: torch.Tensor,
    q: torch.Tensor | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    skip_nan: bool = False,
) -> torch.Tensor:
    """In 2.11 the number of elements has to be a number, not a symbol. What this does is what torch's own kernel does
    (aten/src/ATen/native/Sorting.cpp)."""
    whole = dim is None or self.dim() == 0
    place = 0 if dim is None else dim
    values = (self.reshape(-1) if whole else self.movedim(place, -1)).sort(-1).values
    wanted = q if isinstance(q, torch.Tensor) else torch.full((), q, dtype=self.dtype, device=self.device)
    ranks = wanted.reshape(-1)
    last = values.shape[-1] - 1
    missing = values.isnan()
    if skip_nan:
        counts = (~missing).sum(-1, keepdim=True)
        ranks = (ranks * (counts - 1)).clamp(min=0)
    else:
        ranks = torch.where(missing.any(-1, keepdim=True), last, ranks * last)
    if interpolation in ("lower", "higher", "nearest"):
        ranks = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](ranks)
    below = values.gather(-1, ranks.long())
    if interpolation in ("linear", "midpoint"):
        share = ranks - ranks.floor() if interpolation == "linear" else torch.full_like(ranks, 0.5)
        below = below.lerp(values.gather(-1, ranks.ceil().long()), share)
    below = below.movedim(-1, 0) if wanted.dim() else below.squeeze(-1)
    if not keepdim or self.dim() == 0:
        return below
    if whole:
        return below.reshape(*below.shape[: wanted.dim()], *[1] * self.dim())
    return below.unsqueeze(place % self.dim() + wanted.dim())


def _nanquantile(
    self: torch.Tensor,
    q: torch.Tensor | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> torch.Tensor:
    return _quantile(self, q, dim, keepdim, interpolation=interpolation, skip_nan=True)


def _mend_unique() -> None:
    """In 2.11 the places and counts of unique numbers have the type of the numbers while they are traced."""
    from torch._subclasses import fake_impls

    for operator in (
        torch.ops.aten._unique2.default,
        torch.ops.aten.unique_dim.default,
        torch.ops.aten.unique_consecutive.default,
    ):
        own = fake_impls.op_implementations_dict[operator]
        fake_impls.op_implementations_dict[operator] = _whole_numbers(own)


def _whole_numbers(own: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(fake_mode: Any, *args: Any, **kwargs: Any) -> Any:
        values, *others = own(fake_mode, *args, **kwargs)
        with fake_mode:
            return values, *(other.new_empty(other.shape, dtype=torch.int64) for other in others)

    return kernel
