"""Workarounds for older versions of torch: the only code of rannd that differs between versions.

Each function and constant says which versions of torch have which bug. They are also correct with later versions, which
do not need them. (`torch.autograd.Function.apply` is implemented in C since 2.15 and calls no Python code that could be
intercepted; rannd.graph.modules.autograd_functions intercepts the nodes that it creates, which works in all versions.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from rannd.patches import declare, install, patched
from rannd.torch_versions import NEWEST, minor


def _running() -> tuple[int, int]:
    try:
        return minor(torch.__version__)
    except ValueError:  # `doubt` warns about it at import; a custom build is probably a recent version
        return NEWEST


VERSION = _running()
"""Version of the installed torch."""

ADAGRAD_BEGINS_AT_ONCE = VERSION < (2, 12)
"""In 2.11 Adagrad creates its state in the constructor, and cannot step parameters added later; from 2.12 on it creates
the state in the first step."""

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""Key of kernels composed of other operators. They are replaced for tracing only; eager code does not run them."""


def override_fake(name: str, kernel: Callable[..., Any]) -> None:
    """Replace torch's fake kernel of an operator.

    2.11 needs `allow_override`; later versions allow it by default.
    """
    torch.library.register_fake(name, kernel, allow_override=True)


_SHAPES = declare(
    "shapes in C++", torch.nn.functional, "_infer_size", "it does not accept symbolic sizes", "2.11, 2.12"
)
_CHECKPOINTS = declare(
    "checkpoints", torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", "cannot be traced", "2.11, 2.12"
)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Context manager with the workarounds that are needed while a model is traced, but not while it runs.

    Until 2.12 ``F.binary_cross_entropy`` with weights computes a shape in C++ (``_infer_size``), which does not accept
    symbolic sizes: the trace would be specialized on the number of rows. From 2.13 on it uses ``broadcast_shapes``, as
    the patch does; torch.jit cannot compile that.

    Until 2.12 a failed export leaves a global module hook behind, which keeps the model and the graph alive.
    """
    hooks = torch.nn.modules.module._global_buffer_registration_hooks if VERSION < (2, 13) else {}
    before = set(hooks)
    shapes = (_SHAPES.by(torch.broadcast_shapes),) if hasattr(torch.nn.functional, "_infer_size") else ()
    try:
        with patched(*shapes):
            yield
    finally:
        for key in set(hooks) - before:
            if hooks[key].__module__.startswith("torch."):
                del hooks[key]


def no_recomputing() -> contextlib.AbstractContextManager[None]:
    """Context manager that disables non-reentrant checkpoints, with versions of torch that cannot trace them.

    2.11 saves the inputs of a checkpoint by an autograd.Function, and looks for them in the autograd graph of real
    tensors, which traced tensors do not have. Until 2.12 a checkpoint's saved-tensor hooks stay active after an
    exception, such as a failed trace: tensors that the model saves later would be recomputed from traced tensors.
    Later versions trace through a checkpoint.
    """
    if VERSION >= (2, 13):
        return contextlib.nullcontext()
    if not hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"):
        raise RuntimeError(
            f"torch {torch.__version__} cannot trace through a checkpoint, and torch.utils.checkpoint has no "
            "_checkpoint_without_reentrant_generator that could be patched to disable it; use torch 2.13 or later"
        )

    def directly(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    return patched(_CHECKPOINTS.by(directly))


def mend_kernels() -> None:
    """Replace kernels of older versions that give wrong shapes or dtypes, or fail, while a model is traced."""
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
    """Fake kernel that rejects floating-point indices, which until 2.12 fail only when the graph runs."""
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
    """Correct the shape of an LSTM's final states, which until 2.12 have one dimension too many while traced: the batch
    dimension is squeezed instead of the one before it."""

    def one_layer_lstm(
        own: Callable[..., Any], inp: Any, hidden: Any, params: Any, has_biases: bool, reverse: bool = False
    ) -> Any:
        out, last = own(inp, hidden, params, has_biases, reverse=reverse)
        return out, tuple(state.reshape(given.shape) for state, given in zip(last, hidden, strict=True))

    home = torch._decomp.decompositions
    install(
        declare("the LSTM", home, "one_layer_lstm", "traced with wrong shapes", "2.11, 2.12").around(one_layer_lstm)
    )


def _cross_entropy_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Kernel of cross_entropy_loss that accepts symbolic sizes; until 2.12 torch's own specializes the trace on the
    number of samples for probability targets. Equivalent to aten/src/ATen/native/LossNLL.cpp."""
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
    """Kernel of quantile that accepts symbolic sizes, which torch's own in 2.11 does not. Equivalent to
    aten/src/ATen/native/Sorting.cpp."""
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
    """Correct the dtype of unique's indices and counts, which in 2.11 is the input's while traced."""
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
