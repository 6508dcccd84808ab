"""NaN: a loss that is not a number ends the training, and says which operator of which stage made the first one.

A loss that the model computes is the same on all ranks, so all of them see it without a word. To find where it came
from they run the same step once more, looking at the result of every operator (`check_nan=all` always does): the first
rank whose stage makes a NaN out of numbers raises, and the others hear of it as of any failure.

Infinities are left alone: masks are full of them, and GradScaler lives on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from rannd import log
from rannd.errors import NotANumberError


class Finite:
    """The checks of one wrapped model, as `check_nan` says."""

    def __init__(self, wanted: str = "loss") -> None:
        self.every = wanted == "all"
        """Look at the result of every operator."""
        self.losses = wanted != "off"
        """Look at the losses of training steps: `rannd.runtime.loss_check`."""
        self._warned = False

    def run(self, module: GraphModule, arguments: Sequence[Any]) -> Sequence[Any]:
        """``module(*arguments)``; with `every`, NotANumberError at the first operator that makes a NaN."""
        if not self.every or any(has_nan(value) for value in arguments):
            return module(*arguments)  # type: ignore[no-any-return]
        return _Looking(module).run(*arguments)  # type: ignore[no-any-return]

    def gradients(self, given: Mapping[Any, torch.Tensor | None], found: Mapping[Any, torch.Tensor | None]) -> None:
        """With `every`: NotANumberError where a backward made a NaN of numbers. Names to gradients."""
        if not self.every or any(has_nan(value) for value in given.values()):
            return
        for name, value in found.items():
            if has_nan(value):
                raise NotANumberError(f"check_nan: the gradient of {name} is NaN, those that it is made of are not")

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
            log.get("RaNNCModule").warning("%s (said once)", text)


class _Looking(Interpreter):
    """Runs a part and looks at the result of every operator."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the message says it already

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op in ("call_function", "call_method", "call_module") and not _empties(n) and has_nan(result):
            raise NotANumberError(
                f"the operator {n.name}{_made_at(n)} made a NaN of {', '.join(self._words(each) for each in n.args)}; "
                "numbers that overflow, log or sqrt of what is not positive, 0/0, a learning rate too high in earlier "
                "steps? (check_nan=off trains on)"
            )
        return result

    def _words(self, argument: Any) -> str:
        value = self.env.get(argument) if isinstance(argument, Node) else argument
        if not isinstance(value, torch.Tensor):
            return repr(value)[:60]
        size = f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}"
        if not value.is_floating_point() or not value.numel():
            return size
        return f"{size} from {float(value.detach().min()):.4g} to {float(value.detach().max()):.4g}"


def _empties(node: Node) -> bool:
    """Memory that nobody has written yet may hold anything."""
    return "empty" in str(node.target)


def has_nan(value: Any) -> bool:
    """Whether a tensor, or one in a list or tuple, holds NaN."""
    if isinstance(value, tuple | list):
        return any(has_nan(each) for each in value)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()) or value.is_meta:
        return False
    return bool(torch.isnan(value.detach()).any())


def _made_at(node: Node) -> str:
    """The module of the user's model that an operator belongs to, if it is known."""
    path = node.meta.get("source", node).meta.get("module") or ""
    return f" of module {path}" if path else ""
