"""Force dropout on or off while a module's own code runs: in opaque operators, and during tracing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

KNOWN = (
    nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer, nn.RNNBase,
)  # fmt: skip
"""Module classes whose training flag only controls dropout (and the use of faster kernels without it)."""


@contextlib.contextmanager
def as_in_training(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Set the training flag of the given modules within the context."""
    before = [(module, module.training) for module in modules]
    for module, _ in before:
        module.training = True
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def forced(module: nn.Module, enabled: bool | None) -> Iterator[None]:
    """Switch dropout of a module on or off within the context; None leaves it to the training flags."""
    if enabled is None:
        yield
        return
    known = [each for each in module.modules() if isinstance(each, KNOWN)]
    switched: list[tuple[Any, float]] = [
        (each, each.dropout) for each in known if isinstance(each, (nn.RNNBase, nn.MultiheadAttention))
    ]
    with as_in_training(known if enabled else ()), _Forcing(enabled):
        if not enabled:
            for layer, _ in switched:
                layer.dropout = 0.0
        try:
            yield
        finally:
            for layer, probability in switched:
                layer.dropout = probability


class _Forcing(TorchFunctionMode):
    """Overrides the dropout arguments of torch functions."""

    _FLAGGED = frozenset(
        {functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d,
         functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.dropout_,
         torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout, torch.native_dropout}
    )  # fmt: skip
    """Functions with the arguments (input, p, training or train, ...)."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self._enabled = enabled

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in self._FLAGGED:
            if len(args) > 2:
                args = (*args[:2], self._enabled, *args[3:])
            else:
                given.pop("train" if "train" in given else "training", None)
                given["train" if getattr(func, "__module__", None) != functional.__name__ else "training"] = (
                    self._enabled
                )
        elif func is functional.scaled_dot_product_attention and not self._enabled:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            if "dropout_p" in given:
                given["dropout_p"] = 0.0
        return func(*args, **given)
