"""NaN check of losses: ends the training with an error that names the operator and stage of the first NaN.

A loss computed by the model is the same on all ranks, so all of them notice a NaN without communication. To find its
origin they run the same step again and check the result of every operator (as `check_nan=all` always does): the first
rank whose stage turns numbers into a NaN raises, and the other ranks learn of it as of any failure.

Infinities are not checked: masks contain them, and GradScaler relies on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from rannd import log
from rannd.device.reads import read
from rannd.errors import NotANumberError


class Finite:
    """NaN checks of one wrapped model, as configured by `check_nan`."""

    def __init__(self, wanted: str = "loss") -> None:
        self.every = wanted == "all"
        """Whether to check the result of every operator."""
        self.losses = wanted != "off"
        """Look at the losses of training steps: `rannd.runtime.calls.loss_check`."""
        self._warned = False

    def run(self, module: GraphModule, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run ``module(*arguments)``; with `every`, NotANumberError at the first operator that returns a NaN."""
        if not self.every or any(has_nan(value) for value in arguments):
            return module(*arguments)  # type: ignore[no-any-return]
        return _NanInterpreter(module).run(*arguments)  # type: ignore[no-any-return]

    def gradients(self, given: Mapping[Any, torch.Tensor | None], found: Mapping[Any, torch.Tensor | None]) -> None:
        """With `every`: NotANumberError if a backward turned gradients `given` without NaN into NaN. Keys are names."""
        if not self.every or any(has_nan(value) for value in given.values()):
            return
        for name, value in found.items():
            if has_nan(value):
                raise NotANumberError(
                    f"check_nan: the gradient of {name} is NaN, but the gradients that it is computed from are not"
                )

    @contextlib.contextmanager
    def looking_at_every_operator(self) -> Iterator[None]:
        """For as long as it is entered, look at the result of every operator."""
        every, self.every = self.every, True
        try:
            yield
        finally:
            self.every = every

    def warn(self, text: str) -> None:
        """A warning, the first time."""
        if not self._warned:
            self._warned = True
            log.get("RaNNCModule").warning("%s (logged once)", text)


class _NanInterpreter(Interpreter):
    """Interpreter of a stage that checks the result of every operator."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the message already names the node

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op in ("call_function", "call_method", "call_module") and not _is_uninitialized(n) and has_nan(result):
            raise NotANumberError(
                f"the operator {n.name}{_in_module(n)} made a NaN of {', '.join(map(self._words, n.args))}; "
                "numbers that overflow, log or sqrt of what is not positive, 0/0, a learning rate too high in earlier "
                "steps? (check_nan=off continues training)"
            )
        return result

    def _words(self, argument: Any) -> str:
        value = self.env.get(argument) if isinstance(argument, Node) else argument
        if not isinstance(value, torch.Tensor):
            return repr(value)[:60]
        size = f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
        if not value.is_floating_point() or not value.numel():
            return size
        least, most = read(torch.stack([value.detach().min(), value.detach().max()])).tolist()
        return f"{size} from {least:.4g} to {most:.4g}"


def _is_uninitialized(node: Node) -> bool:
    """Whether a node returns uninitialized memory, which may contain NaN."""
    return "empty" in str(node.target)


def has_nan(value: Any) -> bool:
    """Whether a tensor, or one in a list or tuple, holds NaN."""
    if isinstance(value, tuple | list):
        return any(has_nan(each) for each in value)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()) or value.is_meta:
        return False
    return bool(read(torch.isnan(value.detach()).any()))


def is_finite(value: torch.Tensor) -> bool:
    """Whether a tensor holds neither infinities nor NaN."""
    return bool(read(torch.isfinite(value.detach()).all()))


def _in_module(node: Node) -> str:
    """' of module PATH' for the user's module that an operator belongs to, '' if unknown."""
    path = node.meta.get("source", node).meta.get("module") or ""
    return f" of module {path}" if path else ""
