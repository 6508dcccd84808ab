"""The empty state that ``state_dict()`` gives to ranks that do not get the whole one.

A script for one process saves on every rank: such a rank would overwrite the whole state with an empty one. It is a
dict like any other, but an error to pickle, and so to pass to ``torch.save``, and to save with safetensors.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, ItemsView, Iterator
from typing import Any, NoReturn

import torch

from rannd import patches
from rannd.errors import UsageError

_SAFETENSORS = "safetensors.torch"
"""Module that writes a dict without pickling it. Its functions are imported by name, so they cannot be patched."""


class StateElsewhere(OrderedDict[str, Any]):
    """An empty dict; UsageError where it is saved, alone or inside of something else."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise _refusal()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]  # the view has the class of a dict's
        """Its items, as of any dict."""
        if sys._getframe(1).f_globals.get("__name__") == _SAFETENSORS:
            raise _refusal()
        return super().items()

    def __copy__(self) -> StateElsewhere:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateElsewhere:
        return self.copy()


_SAVE = patches.declare("torch.save", torch, "save", "it empties the file before what cannot be saved is an error")


def install() -> None:
    """Let torch.save refuse an empty state before it opens a file, until `remove`."""
    patches.install(_SAVE.around(_checked))


def remove() -> None:
    """Restore torch's function."""
    patches.remove(_SAVE)


def _checked(original: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(part, StateElsewhere) for part in _parts(obj)):
        raise _refusal()
    return original(obj, *args, **kwargs)


def _parts(obj: Any) -> Iterator[Any]:
    """An object and the values of the dicts, lists and tuples in it."""
    yield obj
    inside = obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple)) else ()
    for each in inside:
        if isinstance(each, (dict, list, tuple)):
            yield from _parts(each)


def _refusal() -> UsageError:
    return UsageError(
        "this rank saves a state that another rank has: state_dict() gives the whole state to rank 0, and an empty one "
        "to the other ranks. Call state_dict() on all ranks and save on one (if pyrannc.get_rank() == 0: "
        "torch.save(..)), or use pyrannc.save_checkpoint"
    )
