"""Base of tensors that have no values on this rank: what they are goes on, what needs values is an error.

Subclasses are also subclasses of torch.Tensor, made by ``torch.Tensor._make_wrapper_subclass``: they have no storage.
Python calls are refused by ``__torch_function__``, what C++ code does by ``__torch_dispatch__``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

_METADATA = frozenset(
    {
        "__hash__",
        "__len__",
        "__repr__",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_signed",
        "ndimension",
        "nelement",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "size",
        "storage_offset",
        "stride",
    }
)
"""Functions that need no values."""

_ACCESSORS = frozenset({"__get__", "__set__", "__delete__"})
_VALUES = frozenset({"H", "T", "data", "imag", "mH", "mT", "real"})
"""Attributes that read or write values."""


class Valueless:
    """Mixin of classes of tensors."""

    @abstractmethod
    def refusal(self, what: str) -> Exception:
        """The error of an operation `what` that needs values."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not needs_values(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        refuse(f".{owner}" if name in _ACCESSORS else name, (*args, *(kwargs or {}).values()))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse(str(func), (*args, *(kwargs or {}).values()))

    def __format__(self, _: str) -> str:
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self.refusal("copy.deepcopy")

    def __copy__(self) -> NoReturn:
        raise self.refusal("copy.copy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self.refusal("pickle")


def needs_values(func: Callable[..., Any]) -> bool:
    """Whether a function of torch, given to ``__torch_function__``, reads or writes values."""
    name = getattr(func, "__name__", str(func))
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return not (name in _METADATA or (name in _ACCESSORS and owner not in _VALUES))


def refuse(what: str, arguments: Iterable[Any]) -> NoReturn:
    """Raise the error of the first tensor without values among the arguments, also in lists."""
    found = next((each for argument in arguments for each in _without_values(argument)), None)
    raise RuntimeError(f"{what} needs values that this rank does not have") if found is None else found.refusal(what)


def _without_values(value: Any) -> Iterable[Valueless]:
    if isinstance(value, Valueless):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _without_values(each)
