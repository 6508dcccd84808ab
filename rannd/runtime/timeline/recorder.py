"""What a step's parts are recorded with. The `StepRecorder` here records nothing (`trace_events = "off"`).

::

    begun = recorder.begin()
    computing.forward(..)
    recorder.end(Doing.FORWARD, stage, stage, action, begun)
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import torch

from rannd.plan.schedule.program import Action

Mark: TypeAlias = "int | torch.Event | None"
"""A moment: of the host in nanoseconds, or of an accelerator's stream."""


class Doing(enum.IntEnum):
    """What a rank does in a step."""

    FORWARD = 0
    BACKWARD = 1
    """First half only, where a backward comes in two."""
    WEIGHT = 2
    """Second half of a backward."""
    SEND = 3
    """Packs a message and begins to send it."""
    RECEIVE = 4
    """Waits for a message that is needed now."""
    SETTLE = 5
    """Waits until what was sent has left."""
    REDUCE = 6
    """From the begin of the first reduction of gradients to the end of the last one, beside computations."""
    DRAIN = 7
    """Waits for the reductions of gradients, when all is computed."""
    AGREE = 8
    """Compares with the other ranks what is called, at the begin of a call: waits for the last one to come."""
    CALL = 9
    """All of a call of the model, and of the backward through it."""
    PACK = 10
    """Within a computation: copies gradients into a bucket and begins to reduce it."""


COMPUTING = (Doing.FORWARD, Doing.BACKWARD, Doing.WEIGHT)
"""Computations of a stage."""

WAITING = (Doing.AGREE, Doing.RECEIVE, Doing.SETTLE, Doing.DRAIN)
"""Waits of the host for others, in a call."""

OF_HOST = frozenset({Doing.AGREE, Doing.CALL})
"""What is measured by the host's clock in any case."""

Place: TypeAlias = tuple[Doing, int, int]
"""What is summed up: of a computation with its stage, twice; of a message with both of its stages (`Layout.edges`)."""


class StepRow:
    """Sums over one step of a rank."""

    __slots__ = (
        "agreed_ns",
        "begin_ns",
        "counted",
        "delays",
        "end_ns",
        "events",
        "firsts",
        "host_ns",
        "number",
        "pending",
        "sums",
    )

    def __init__(self, number: int, begin_ns: int) -> None:
        self.number = number
        """Of the call of the model that began it; it goes back where an older state of the training is loaded."""
        self.begin_ns, self.end_ns = begin_ns, 0
        """Begin, and that of the next step."""
        self.agreed_ns = 0
        """End of its agreement."""
        self.sums: dict[Place, list[int]] = {}
        """How often, and nanoseconds together."""
        self.delays: dict[tuple[Doing, int], list[int]] = {}
        """Nanoseconds in which what was done of each kind for each stage (`src`) waited for a processor: that other
        processes had, and that other threads of its own process had."""
        self.firsts: dict[Place, int] = {}
        """End of the first message of each edge that was sent, or received."""
        self.host_ns = 0
        """What the host did in its calls beside computing and waiting, without waiting for a processor."""
        self.counted = False
        """Whether it is a step as it was planned."""
        self.pending = 0
        """Parts whose times the device has not given yet."""
        self.events = 0
        """Number of events that were put into the ring."""


class StepRecorder:
    """Records nothing."""

    on = False
    """Whether anything is recorded."""

    def begin(self) -> Mark:
        """Return the moment at which an action begins."""
        return None

    def end(self, kind: Doing, src: int, dst: int, action: Action | None, begun: Mark) -> None:
        """Record an action that ends now; `src`, `dst`: see `Place`."""

    def begin_on_host(self) -> int:
        """Return the moment at which a part of `OF_HOST` begins."""
        return 0

    def end_on_host(self, kind: Doing, begun: int) -> None:
        """Record a part of `OF_HOST` that ends now."""

    def forget(self) -> None:
        """Drop what is known of steps: those that follow are of another deployment."""

    def thin_out(self) -> None:
        """From the next step on, record one in several, unless each action is recorded: what was asked is known."""

    def begin_step(self, number: int) -> None:
        """Begin the row of a step, which ends the one before; what is recorded from now on belongs to it."""

    def count_step(self) -> None:
        """Say that the step that has begun is one as it was planned."""

    def rows(self) -> list[StepRow]:
        """Return the steps that count and have ended, of which all is known, in order."""
        return []

    def settle(self) -> None:
        """Wait until all is known of what was recorded. Between steps only: an accelerator is waited for."""

    def events(self, number: int) -> list[tuple[Doing, Action | None, int, int]]:
        """Return the events of a step, with begin and end on the host's clock in nanoseconds.

        Empty: they are not recorded, or not all of them are in the ring any more.
        """
        return []


OFF = StepRecorder()
