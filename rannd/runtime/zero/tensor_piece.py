"""A tensor of which each replica of a stage has a piece: a gradient (ZeRO 2 and 3), or a parameter's values (ZeRO 3).

It has shape, dtype and device of the whole, and goes through whatever treats each element by itself: scaling, clipping
by value, GradScaler, ``zero_()``. An operand of the whole's shape is cut. What needs all elements, such as a norm, is
an error that names the functions of rannd which have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from rannd.errors import UsageError
from rannd.runtime.zero.division import Piece

_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
"""What GradScaler does: its second argument becomes 1 if there is an infinity or NaN."""
_ELEMENTWISE = frozenset(
    {
        _UNSCALE,
        "_to_copy",
        "copy_",
        "detach",
        "empty_like",
        "fill_",
        "full_like",
        "masked_fill",
        "masked_fill_",
        "ones_like",
        "zero_",
        "zeros_like",
    }
)
"""Operators that treat each element by itself, besides those that torch tags as pointwise."""
_REDUCING = frozenset({"_foreach_max", "_foreach_norm"})


_NEW = frozenset({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"})
"""Operators that take dtype and device of a tensor alone."""


class TensorPiece(torch.Tensor):
    """A piece of a tensor, in place of the whole.

    Args:
        flat: One-dimensional: the elements of `piece`.
        piece: Which elements of the flattened tensor they are.
        shape: That of the whole.
    """

    flat: torch.Tensor
    piece: Piece
    agree: Callable[[torch.Tensor], None] | None = None
    """Makes the flag with which GradScaler remembers an infinity that of all replicas; None: it is this rank's."""

    @staticmethod
    def __new__(cls, flat: torch.Tensor, piece: Piece, shape: Sequence[int]) -> TensorPiece:
        made: TensorPiece = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=flat.dtype, device=flat.device)
        made.flat, made.piece = flat, piece
        return made

    def __init__(self, *_: Any) -> None:
        pass

    @property
    def data(self) -> torch.Tensor:
        """A tensor that shares the elements; torch's own setter would exchange those of the empty wrapper."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UsageError(
                f".data of {self!r} was set to a tensor of shape {tuple(value.shape)} and {value.dtype}; it has to "
                "have the same shape and dtype"
            )
        self.flat = _like("data", value.detach(), self)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _NEW:  # of any shape: an ordinary tensor
            return func(args[0].flat, *args[1:], **kwargs)
        foreach = name.startswith("_foreach_") and name not in _REDUCING
        fits = foreach or name in _ELEMENTWISE or torch.Tag.pointwise in func.tags
        if not fits or "out" in kwargs:
            _refuse(name, args, kwargs)
        if func._schema.is_mutable and not _takes_pieces(args):
            _refuse(name, args, kwargs)
        flat_args = [_cut(name, each, args, kwargs) for each in _aligned(args)]
        found = func(*flat_args, **{key: _cut(name, each, args, kwargs) for key, each in kwargs.items()})
        if name == _UNSCALE:
            agree = next((each.agree for each in _sharded(args) if each.agree is not None), None)
            if agree is not None:
                agree(args[1])
        if func._schema.is_mutable:
            return args[0] if isinstance(found, torch.Tensor) else found
        return _wrapped(found, args)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TensorPiece({tuple(self.shape)}, {self.dtype}, elements {self.piece.start} to {self.piece.stop})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _error("pickle", self)


def flat_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor: the elements of its piece, or the tensor itself."""
    return tensor.flat if isinstance(tensor, TensorPiece) else tensor


def _cut(name: str, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An argument with pieces in place of sharded gradients and of tensors that go with them."""
    whole = next(_sharded((*args, *kwargs.values())))
    if isinstance(value, TensorPiece):
        if value.piece != whole.piece or value.shape != whole.shape:
            raise UsageError(f"{name} of {value!r} and {whole!r}: they are not pieces of tensors of one shape")
        return value.flat
    if isinstance(value, _Pairs):
        return [_like(name, tensor, model) for tensor, model in value]
    return _like(name, value, whole) if isinstance(value, torch.Tensor) else value


def _like(name: str, tensor: torch.Tensor, whole: TensorPiece | None) -> torch.Tensor:
    """The elements of `tensor` that go with a sharded gradient."""
    if isinstance(tensor, TensorPiece):
        return tensor.flat
    if whole is None or tensor.numel() == 1:
        return tensor.reshape(()) if whole is not None and tensor.ndim > 1 else tensor
    if tensor.shape != whole.shape:
        raise UsageError(
            f"{name} of {whole!r} with a tensor of shape {tuple(tensor.shape)}: under ZeRO stages 2 and 3 the other "
            f"tensor has to have one element, or the shape {tuple(whole.shape)}; expand it first"
        )
    return tensor.reshape(-1)[whole.piece.start : whole.piece.stop]


class _Pairs(list[tuple[torch.Tensor, TensorPiece | None]]):
    """Tensors of a list argument, each with the sharded gradient at its place in one of the lists."""


def _aligned(args: Sequence[Any]) -> Iterator[Any]:
    """The arguments, with lists of tensors as `_Pairs`."""
    lists = [each for each in args if _is_list(each)]
    for value in args:
        if not _is_list(value):
            yield value
            continue
        yield _Pairs(
            (tensor, next((o[place] for o in lists if isinstance(_at(o, place), TensorPiece)), None))
            for place, tensor in enumerate(value)
        )


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, torch.Tensor) for each in value)


def _takes_pieces(args: Sequence[Any]) -> bool:
    """Whether what an operator changes, its first argument, are pieces wherever pieces are among its arguments."""
    changed = next(_aligned(args))
    if isinstance(changed, _Pairs):
        return all(model is None or isinstance(tensor, TensorPiece) for tensor, model in changed)
    return isinstance(changed, TensorPiece)


def _wrapped(found: Any, args: Sequence[Any]) -> Any:
    """Results as pieces of tensors of the whole's shape."""
    if isinstance(found, torch.Tensor):
        whole = next(_sharded(args))
        return TensorPiece(found, whole.piece, whole.shape)
    models = [model for _, model in next(each for each in _aligned(args) if isinstance(each, _Pairs))]
    return [
        tensor if model is None else TensorPiece(tensor, model.piece, model.shape)
        for tensor, model in zip(found, models, strict=True)
    ]


def _sharded(values: Sequence[Any]) -> Iterator[TensorPiece]:
    for value in values:
        if isinstance(value, TensorPiece):
            yield value
        elif isinstance(value, list | tuple):
            yield from _sharded(value)


def _refuse(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
    raise _error(name, next(_sharded((*args, *kwargs.values()))))


def _error(name: str, tensor: TensorPiece) -> UsageError:
    return UsageError(
        f"{name} needs the whole of {tensor!r}, of which this rank has only these elements: ZeRO stages 2 and 3 divide "
        "gradients, stage 3 also parameters, among the replicas of a stage. Called on all ranks, "
        "model.get_param(name) and model.get_param_grad(name) copy a whole parameter and its gradient, "
        "torch.nn.utils.clip_grad_norm_, torch.nn.utils.get_total_norm and model.calc_grad_norm() compute norms of "
        "gradients, and hooks of register_hook get whole gradients; or set zero_stage=1"
    )
