"""Restore parameters that a model writes in place when it runs, with copy on write.

A model may write into parameters that it does not train (a momentum encoder, cluster centres). Copying all parameters
in advance would double their memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class _Keeping(TorchDispatchMode):
    """Dispatch mode that copies a parameter before an operator writes into its storage."""

    def __init__(self, parameters: dict[int, tuple[str, nn.Parameter]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters
        self.kept: dict[str, tuple[nn.Parameter, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._keep(args[place] if place < len(args) else kwargs.get(argument.name))
        return func(*args, **kwargs)

    def _keep(self, written: object) -> None:
        for tensor in pytree.tree_leaves(written):
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                continue
            name, parameter = self._parameters.get(tensor.untyped_storage()._cdata, ("", None))
            if parameter is not None and name not in self.kept:
                self.kept[name] = parameter, parameter.detach().clone()


@contextlib.contextmanager
def kept_parameters(model: nn.Module) -> Iterator[dict[str, tuple[nn.Parameter, torch.Tensor]]]:
    """Undo writes into the model's parameters; yields a dict of the written ones with their original values."""
    named = [(name, p, p.data) for name, p in model.named_parameters() if p.layout is torch.strided and not p.is_meta]
    mode: Any = _Keeping
    keeping = mode({p.untyped_storage()._cdata: (name, p) for name, p, _ in named})
    try:
        with keeping:
            yield keeping.kept
    finally:
        for name, parameter, data in named:
            if parameter.data_ptr() != data.data_ptr():  # `.data` was replaced
                keeping.kept.setdefault(name, (parameter, data))
                parameter.data = data
        for parameter, before in keeping.kept.values():
            parameter.data.copy_(before)
