"""How many microbatches a replica runs, and how many of them are between forward and backward at a time."""

from __future__ import annotations

import numpy as np

from rannd.plan.schedule.schedules import ALL_SCHEDULES
from rannd.plan.topology import Counts, Mask


class MicrobatchCounts:
    """Numbers of microbatches of all possible stages of one variant, or of several.

    Args:
        world: Number of devices.
        schedule: Its name.
        microbatches: Of a rank; of several variants ``[variant, 1, 1]``, which is then in front of the shapes below.
        replicas: Numbers of replicas that stages may have, ascending.
        delays: ``[start, end]``: whether a stage delays gradients of parameters, if the schedule does so.
    """

    def __init__(self, world: int, schedule: str, microbatches: int | Counts, replicas: Counts, delays: Mask) -> None:
        self.steady = ALL_SCHEDULES[schedule].takes_turns
        """Whether forward and backward take turns."""
        self.splits = ALL_SCHEDULES[schedule].delays_weights
        """Whether parameter gradients are delayed until a slot would be idle."""
        self.blocks = delays.shape[-1] - 1
        self.replicas = replicas
        self.own = microbatches
        """Microbatches of a rank."""
        self.pieces: Counts = -(-world * microbatches // replicas)
        """Maximum number of microbatches of a replica, by number of replicas."""
        self.waiting = -(-world // replicas)
        """Under zb_h1 at most this minus one microbatches wait for parameter gradients, by number of replicas."""
        self._has_alone = bool(replicas[-1] == world)
        """Whether the last number of replicas takes all devices."""
        self._delays = delays
        self._windows: dict[int, tuple[Counts, Counts]] = {}
        """By devices of later stages, the most microbatches in flight, and of those that there are; without delays."""

    def most(self, end: int, used: int | None, *, split: bool = True) -> Counts:
        """Return the maximum number of microbatches that a stage keeps, if later stages have `used` devices.

        They are counted from forward to backward, or to its second half if the backward is split (`split`). With `used`
        None, the result is the maximum for any later stages. See schedules.py for the numbers of 1F1B and zb_h1. The
        result is ``[start, number of replicas]``, or one row for all starts.
        """
        if not self.steady or used is None:
            return self.pieces[None]
        if used not in self._windows:
            window = np.ones_like(self.pieces) if used == 0 else -(-(used + self.replicas) // self.replicas) + 1
            self._windows[used] = window, np.minimum(self.pieces, window)[None]
        window, plain = self._windows[used]
        if not (self.splits and split):
            return plain
        found = window[None]
        found = np.where(self._delays[:end, end, None], self.waiting + 1, found)
        if end == self.blocks and self._has_alone:
            found[0, -1] = window[-1]  # one stage delays nothing
        result: Counts = np.minimum(self.pieces, found)
        return result

    def most_of(self, start: int, end: int, column: int, *, used: int, split: bool) -> int:
        """The same for one stage; `column`: the place of its number of replicas."""
        found = self.most(end, used, split=split)
        return int(found[start if len(found) > 1 else 0, column])
