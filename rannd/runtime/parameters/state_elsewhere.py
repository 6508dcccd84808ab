"""What ``state_dict()`` gives to the ranks that do not get the whole state: its entries, without their values.

A script for one process saves on every rank: such a rank would overwrite the whole state with what it has. A tensor of
such a state has a shape and a dtype, and can be moved, copied and converted, as scripts do before one rank saves; every
use of its values is an error, as it is to pass it to pickle or safetensors, alone or inside of something else.
``torch.save`` to a file writes nothing and says so, since rank 0 of such a script writes the file: an error would end
the job while it does. Entries that are not tensors are empty dicts, which cannot be saved either.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from rannd import log, patches
from rannd.errors import UsageError
from rannd.runtime.parameters.valueless import Valueless

_COPIES = {"__copy__", "__deepcopy__", "clone", "contiguous", "cpu", "cuda", "detach", "pin_memory", "to"}
_COPIES |= {"bfloat16", "double", "float", "half", "type", "type_as"}
"""Methods whose result has the same values, maybe in another dtype or on another device."""


class TensorElsewhere(Valueless, torch.Tensor):  # type: ignore[misc]
    """A tensor of another rank's state; its values are an error."""

    _entry: str

    @staticmethod
    def of(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Any:
        """The entry `name` of a state."""
        found: Any = torch.Tensor._make_wrapper_subclass(TensorElsewhere, shape, dtype=dtype, device=device)
        found._entry = name
        return found

    def refusal(self, what: str) -> Exception:
        """See `Valueless`."""
        return _refusal(f"{what} needs the values of {self._entry}")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, cls) and (name in _COPIES or func == torch.Tensor.data.__get__):  # type: ignore[attr-defined]
            # A tensor with one element tells which dtype and device the arguments ask for.
            one = torch.empty((), dtype=first.dtype)
            if name in _COPIES:
                one = getattr(one, name)(*args[1:], **(kwargs or {}))
            return cls.of(first._entry, tuple(first.shape), one.dtype, one.device)
        return super().__torch_function__(func, types, args, kwargs)

    def __copy__(self) -> Any:
        return TensorElsewhere.of(self._entry, tuple(self.shape), self.dtype, self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__copy__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TensorElsewhere({self._entry}, {self.dtype}, {tuple(self.shape)}, values on another rank)"


class StateElsewhere(OrderedDict[str, Any]):
    """An empty dict in place of a part of a state that is not a tensor; UsageError where it is saved."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refusal("pickle needs the whole state")

    def __copy__(self) -> StateElsewhere:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateElsewhere:
        return self.copy()


def optimizer_elsewhere() -> dict[str, Any]:
    """An optimizer's state_dict that another rank has."""
    return {"state": StateElsewhere(), "param_groups": StateElsewhere()}


def described(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """What `elsewhere` needs to know of the entries of a state whose names begin with `prefix`."""
    return {
        name: (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None
        for name, value in state.items()
        if str(name).startswith(prefix)
    }


def elsewhere(description: dict[str, Any]) -> dict[str, Any]:
    """The entries of a described state, without values.

    Not an OrderedDict, in which Accelerate looks for tensors that share memory before it asks which rank saves.
    """
    return {
        name: StateElsewhere() if about is None else TensorElsewhere.of(name, *about)
        for name, about in description.items()
    }


_SAVE = patches.declare(
    "torch.save", torch, "save", "another rank's state has no values to write, and rank 0 may be writing the file"
)
_told = False
"""Whether this process was told of it."""


def install() -> None:
    """Let torch.save leave another rank's state to that rank, until `remove`."""
    patches.install(_SAVE.around(_saved_here))


def remove() -> None:
    """Restore torch's function."""
    global _told
    _told = False
    patches.remove(_SAVE)


def _saved_here(original: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    global _told
    file = args[0] if args else kwargs.get("f")
    try:
        ensure_here(obj, "torch.save")
    except UsageError:
        if not isinstance(file, (str, os.PathLike)):
            raise
        if not _told:
            log.get("RaNNCModule").warning(
                "torch.save writes nothing to %s on this rank: state_dict() has given the values to rank 0, which has "
                "to write them. To be without this line, save if pyrannc.get_rank() == 0",
                os.fspath(file),
            )
        _told = True
        return None
    return original(obj, *args, **kwargs)


def ensure_here(state: Any, what: str) -> None:
    """UsageError where a state, or something in it, is another rank's; `what` needs its values."""
    for part in _parts(state):
        if isinstance(part, StateElsewhere):
            raise _refusal(f"{what} needs the whole state")
        if isinstance(part, TensorElsewhere):
            raise part.refusal(what)


def _parts(obj: Any) -> Iterator[Any]:
    """An object and all that is inside of it, where it is a dict, list or tuple."""
    yield obj
    for each in obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else ():
        yield from _parts(each)


def _refusal(why: str) -> UsageError:
    return UsageError(
        f"this rank uses a state that another rank has: {why}, but state_dict() gives it to rank 0 alone. Call "
        "state_dict() on all ranks and save on one (if pyrannc.get_rank() == 0: torch.save(..)), or use "
        "pyrannc.save_checkpoint; with rank0_only=False every rank gets the values"
    )
