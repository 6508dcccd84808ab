"""What happens in a training step, as actions that the emulator and a real rank both play."""

from __future__ import annotations

from typing import Protocol

from parity.case import STEPS, Case

SCRIPTS: dict[str, tuple[str, ...]] = {
    "plain": ("zero", "forward", "backward", "step"),
    # gradients of an interleaved loss wait in a buffer: zero_grad between forward and backward is harmless
    "latezero": ("forward", "zero", "backward", "step"),
    "accumulate": ("zero", "forward", "backward", "forward", "backward", "step"),
    "average": ("zero", "forward", "half", "forward", "half", "step"),
    "delay": ("zero", "delay", "forward", "backward", "reduce", "forward", "backward", "step"),
    "allreduce": ("zero", "delay", "forward", "backward", "forward", "backward", "allreduce", "reduce", "step"),
    "together": ("zero", "forward", "forward", "backward", "step"),
    "evaluate": ("zero", "forward", "backward", "step", "evaluate"),
    "evalfirst": ("evaluate", "zero", "forward", "backward", "evaluate", "step"),
    "probe": ("zero", "forward", "backward", "probe", "step"),
    "decay": ("zero", "forward", "backward", "step", "decay"),
}
"""Actions of one step:

zero       optimizer.zero_grad()
forward    a training call with the next mini-batch
backward   backward through the sum of the losses of all calls since the last backward
half       the same, with the losses halved
delay      gradients are not reduced from here on
reduce     they are, from the next backward on
allreduce  reduces what was delayed
step       optimizer.step()
evaluate   a call in eval mode under no_grad
probe      a call in training mode under no_grad
decay      the learning rate of every parameter group is halved
"""


class Trainer(Protocol):
    """One training run; `step` and `call` choose the mini-batch."""

    def zero(self) -> None: ...
    def forward(self, step: int, call: int) -> None: ...
    def backward(self, scale: float) -> None: ...
    def delay(self, on: bool) -> None: ...
    def allreduce(self) -> None: ...
    def optimize(self, step: int) -> None: ...
    def look(self, step: int, call: int, *, training: bool) -> None: ...
    def decay(self) -> None: ...


def play(case: Case, trainer: Trainer) -> None:
    """All steps of a case."""
    for step in range(STEPS):
        call = 0
        for action in SCRIPTS[case.script]:
            match action:
                case "zero":
                    trainer.zero()
                case "forward":
                    trainer.forward(step, call)
                case "backward" | "half":
                    trainer.backward(0.5 if action == "half" else 1.0)
                case "delay" | "reduce":
                    trainer.delay(action == "delay")
                case "allreduce":
                    trainer.allreduce()
                case "step":
                    trainer.optimize(step)
                case "evaluate" | "probe":
                    trainer.look(step, call, training=action == "probe")
                case "decay":
                    trainer.decay()
                case _:
                    raise ValueError(f"script {case.script!r} has the unknown action {action!r}")
            call += action in ("forward", "evaluate", "probe")
