"""`PlanMetrics`: predicted and measured steps, memory and samples per second for TensorBoard, W&B or a log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pyrannc
from rannd.errors import UsageError
from rannd.runtime.step_metrics import StepMetrics

Write = Callable[[Mapping[str, float], int], object]


class PlanMetrics:
    """Tells a tracker, every few steps, what a partitioned model does.

    Args:
        model: The wrapped model.
        tracker: On rank 0 a ``torch.utils.tensorboard.SummaryWriter``, a run of Weights & Biases (``wandb.init()``), a
            ``logging.Logger``, or a function of the numbers by name and the step; of other ranks it is not used.
        every: Number of steps between two of them.

    Raises:
        UsageError: The tracker is none of these.
    """

    def __init__(self, model: pyrannc.RaNNCModule, tracker: Any, every: int = 20) -> None:
        if every < 1:
            raise UsageError(f"PlanMetrics(.., every={every}): use 1 or more")
        self._metrics = StepMetrics(model._session)
        self._write = _writer(tracker) if pyrannc.get_rank() == 0 else None
        self._every, self._steps = every, 0

    def step(self) -> None:
        """Count a step of the optimizer. On all ranks; collective every `every` steps."""
        self._steps += 1
        if self._steps % self._every:
            return
        found = self._metrics.collect()
        if self._write is not None and found:
            self._write(found, self._steps)


def _writer(tracker: Any) -> Write:
    if isinstance(tracker, logging.Logger):
        return lambda found, step: tracker.info("step %d: %s", step, _text(found))
    if hasattr(tracker, "add_scalar"):
        return lambda found, step: [tracker.add_scalar(name, value, step) for name, value in found.items()]
    if hasattr(tracker, "log"):
        return lambda found, step: tracker.log(dict(found), step=step)
    if callable(tracker):
        write: Write = tracker
        return write
    raise UsageError(
        f"PlanMetrics(.., tracker={tracker!r}): use a SummaryWriter, a run of wandb, a Logger or a function"
    )


def _text(found: Mapping[str, float]) -> str:
    return ", ".join(f"{name.removeprefix('rannd/')} {value:.4g}" for name, value in found.items())
