"""Restore parameters that a model writes in place when it runs, with copy on write.

A model may write into parameters that it does not train (a momentum encoder, cluster centres). Copying all parameters
in advance would double their memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Writes:
    """Parameters of a module that are written or replaced since this was made.

    Writes through ``.data`` and ``parameter.data = ..`` are among them, which do not count as a new version.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.before = {
            name: (parameter, parameter.data)
            for name, parameter in module.named_parameters()
            if parameter.layout is torch.strided and not parameter.is_meta
        }
        """All of its parameters in memory, and their values: the memory, not a copy."""
        self._in_place: set[str] = set()

    def note(self, name: str) -> None:
        """Called before an operator writes into a parameter."""
        self._in_place.add(name)

    def values(self) -> dict[str, torch.Tensor]:
        """Return the parameters that were written or replaced, as they are now, by name."""
        now = dict(self._module.named_parameters())
        return {
            name: now[name].detach()
            for name, (parameter, data) in self.before.items()
            if name in now
            and (name in self._in_place or now[name] is not parameter or parameter.data_ptr() != data.data_ptr())
        }


class _Noting(TorchDispatchMode):
    """Dispatch mode that calls `note` before an operator writes into the memory of one of `parameters`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], note: Callable[[str], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {parameter.untyped_storage()._cdata: name for name, parameter in parameters.items()}
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._written(args[place] if place < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _written(self, argument: object) -> None:
        for tensor in pytree.tree_leaves(argument):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                name = self._names.get(tensor.untyped_storage()._cdata)
                if name is not None:
                    self._note(name)


@contextlib.contextmanager
def noted_writes(module: nn.Module, note: Callable[[str], object] | None = None) -> Iterator[Writes]:
    """Yield the writes into the module's parameters; `note` is called before each of an operator, with the name."""
    writes, mode = Writes(module), cast(Any, _Noting)

    def noted(name: str) -> None:
        if note is not None:
            note(name)
        writes.note(name)

    with mode({name: parameter for name, (parameter, _) in writes.before.items()}, noted):
        yield writes


@contextlib.contextmanager
def kept_parameters(model: nn.Module) -> Iterator[Writes]:
    """Undo writes into the model's parameters at the end; yields these writes.

    A parameter that is replaced by another one is not put back here.
    """
    kept: dict[str, torch.Tensor] = {}
    before: dict[str, tuple[nn.Parameter, torch.Tensor]] = {}

    def keep(name: str) -> None:
        if name not in kept:
            kept[name] = before[name][1].clone()

    with contextlib.ExitStack() as stack:
        writes = stack.enter_context(noted_writes(model, keep))
        before.update(writes.before)
        try:
            yield writes
        finally:
            stack.close()
            for parameter, data in before.values():
                if parameter.data_ptr() != data.data_ptr():  # `.data` was replaced
                    parameter.data = data
            for name, value in kept.items():
                before[name][1].copy_(value)
