"""NaN check of losses: ends the training with an error that names the operator and stage of the first NaN.

A loss computed by the model is the same on all ranks, so all of them notice a NaN without communication. To find its
origin they run the same step again and check the result of every operator (as `check_nan=all` always does): the first
rank whose stage turns numbers into a NaN raises, and the other ranks learn of it as of any failure.

Infinities are not checked: masks contain them, and GradScaler relies on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from rannd import log
from rannd.errors import NotANumberError


class Finite:
    """NaN checks of one process, as configured by `check_nan`."""

    def __init__(self, wanted: str = "loss") -> None:
        self.every = wanted == "all"
        """Whether to check the result of every operator."""
        self._loss = wanted != "off"
        self._warned = False

    def run(self, module: GraphModule, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run ``module(*arguments)``; with `every`, NotANumberError at the first operator that returns a NaN."""
        if not self.every or any(_has_nan(value) for value in arguments):
            return module(*arguments)  # type: ignore[no-any-return]
        return _Looking(module).run(*arguments)  # type: ignore[no-any-return]

    def gradients(self, given: Mapping[Any, torch.Tensor | None], found: Mapping[Any, torch.Tensor | None]) -> None:
        """With `every`: NotANumberError if a backward turned gradients `given` without NaN into NaN. Keys are names."""
        if not self.every or any(_has_nan(value) for value in given.values()):
            return
        for name, value in found.items():
            if _has_nan(value):
                raise NotANumberError(
                    f"check_nan: the gradient of {name} is NaN, but the gradients that it is computed from are not"
                )

    def losses(
        self,
        losses: Mapping[str, torch.Tensor],
        given: Callable[[], Mapping[str, torch.Tensor]],
        empty: Callable[[], bool],
        again: Callable[[], object],
        *,
        half: bool,
    ) -> None:
        """Check the scalar outputs of a training step that require gradients; they are equal on all ranks.

        Args:
            losses: Name to value.
            given: Returns the inputs and parameters of this rank's stage, by name.
            empty: Whether some mean over this rank's mini-batch has no labels.
            again: Runs the step's forward once more, and waits for all ranks.
            half: Under autocast to float16, where a GradScaler skips such a step: warn once instead of raising.

        Raises:
            NotANumberError: one of them is NaN.
        """
        if not self._loss:
            return
        wrong = [name for name, value in losses.items() if _has_nan(value)]
        if not wrong:
            endless = [name for name, value in losses.items() if not bool(torch.isfinite(value).all())]
            if endless:
                self._warn(f"the model's loss {endless[0]} is infinite")
            return
        text = f"the model's loss {wrong[0]} is NaN"
        if half:
            self._warn(f"{text}; a GradScaler skips this step")
            return
        for name, value in given().items():
            if _has_nan(value):
                raise NotANumberError(
                    f"{text}, because {name} of this rank holds NaN (check_nan=off continues training)"
                )
        if empty():
            raise NotANumberError(
                f"{text}, because no label of this rank's mini-batch counts (all are ignored or masked), and the mean "
                "over nothing is NaN; skip such mini-batches, or train on with check_nan=off: their gradients are zero"
            )
        every, self.every = self.every, True
        try:
            again()
        finally:
            self.every = every
        raise NotANumberError(
            f"{text}, but no operator made a NaN when the step ran again: look at the inputs, and at what the model "
            "changes while it runs (check_nan=off continues training)"
        )

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            log.get("RaNNCModule").warning("%s (logged once)", text)


class _Looking(Interpreter):
    """Interpreter of a stage that checks the result of every operator."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the message already names the node

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op in ("call_function", "call_method", "call_module") and not _empties(n) and _has_nan(result):
            raise NotANumberError(
                f"the operator {n.name}{_made_at(n)} made a NaN of {', '.join(self._words(each) for each in n.args)}; "
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
        return f"{size} from {float(value.detach().min()):.4g} to {float(value.detach().max()):.4g}"


def _empties(node: Node) -> bool:
    """Whether a node returns uninitialized memory, which may contain NaN."""
    return "empty" in str(node.target)


def _has_nan(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_has_nan(each) for each in value)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()) or value.is_meta:
        return False
    return bool(torch.isnan(value.detach()).any())


def _made_at(node: Node) -> str:
    """' of module PATH' for the user's module that an operator belongs to, '' if unknown."""
    path = node.meta.get("source", node).meta.get("module") or ""
    return f" of module {path}" if path else ""
