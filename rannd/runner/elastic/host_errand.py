"""What is done while the ranks of an elastic job run: its host file is read, and what the ranks tell is noted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rannd.ranks import rank_notes
from rannd.runner.elastic.host_file import LOOK_S, HostFile
from rannd.runner.elastic.members import Members, loses_this_machine, size_of, words
from rannd.runner.elastic.patience import Patience
from rannd.runner.elastic.rescue_plan import plan_rescue
from rannd.runner.elastic.restarts import Restarts
from rannd.runner.elastic.slow_hosts import SlowHosts
from rannd.runner.resources.host_list import Host
from rannd.runner.watch.errand import HeldPart, RescueOrder

_NEVER_S = 3600.0
RESCUE_S = 120.0
"""Minimum seconds for watchers to write what ranks have left in memory."""
STAYS = (
    "{} does not name this machine any more, but rannc-run itself runs here: the job goes on with the hosts that it "
    "had. To leave this machine, end rannc-run and start it elsewhere"
)


@dataclass(frozen=True)
class History:
    """What a job remembers from start to start."""

    restarts: Restarts
    """Counts failures and steps."""
    patience: Patience
    """Knows when hosts that come are worth a restart."""
    slow: SlowHosts


class HostErrand:
    """The errand of one start, see `rannd.runner.watch.errand`.

    Args:
        file: The host file; None: the hosts do not change.
        members: The hosts of the job.
        here: Those on which this start's ranks run.
        leave_timeout: Seconds that ranks get to save and end if hosts change.
        grace: The same after SIGTERM.
        history: What hears of the ranks' steps.
        say: Gets a line for the user.
    """

    def __init__(
        self,
        file: HostFile | None,
        members: Members,
        here: Sequence[Host],
        leave_timeout: float,
        grace: float,
        history: History,
        say: Callable[[str], None],
    ) -> None:
        self.leave_s = grace
        self.rescue_s = max(leave_timeout, RESCUE_S)
        self._restarts, self._patience, self._slow = history.restarts, history.patience, history.slow
        self._file, self._members, self._here = file, members, list(here)
        self._leave_timeout, self._say = leave_timeout, say
        self._look_at = time.monotonic()
        self._patience.start(self._look_at)
        self._join_at = math.inf
        """When the hosts that have come are worth a restart."""
        self.changing = False
        """The ranks were asked to leave because the hosts change."""
        self.speaks = False
        """The script uses `pyrannc.elastic`."""
        self.left = False
        """Some rank has ended because it was asked to."""
        self.left_after = -1
        """After this step."""
        self.saved = -1
        """Step of the newest checkpoint; -1: none is known."""
        self._whole = -1
        """The same, of the training that `pyrannc.elastic` saves: scripts save others for purposes of their own."""
        self.rescued = ""
        """Folder of what was written after a failure; '': nothing was."""

    def due(self) -> float:
        """Return when the file is looked at next."""
        return self._look_at

    def run(self, leave: Callable[[float], None]) -> None:
        """Look at the host file, and let the ranks leave if other ones are to run."""
        now = time.monotonic()
        self._look_at = now + (_NEVER_S if self._file is None else LOOK_S)
        if self._file is None or self.changing:
            return
        if not self._file.changed():
            if now >= self._join_at:
                self._ask(leave, "New slots have waited for long enough", self._members.chosen())
            return
        named = self._file.hosts
        if loses_this_machine(self._members.named, named):
            self._say(STAYS.format(self._file.path))
            return
        before = self._members.chosen()
        self._members.name(named)
        self._slow.leave_out()
        found = self._members.chosen()
        if found == self._here:
            self._join_at = math.inf  # those that had come are gone again, or one was to go and stays
        elif found != before:
            self._patience.change(now)
            self._weigh(leave, before, found, now)

    def _weigh(self, leave: Callable[[float], None], before: list[Host], found: list[Host], now: float) -> None:
        """Decide when the ranks leave, if the hosts of the next start are `found`; until now they were `before`."""
        assert self._file is not None
        why = f"{self._file.path} has changed"
        still = [host for host in self._here if _holds(before, [host])]  # others are left out from now on
        if not _holds(found, still):
            self._ask(leave, why, found)
            return
        new = size_of(found) - size_of(still)
        if self._join_at == math.inf and _holds(before, found):
            new = 0  # hosts that were left out until now are no reason to stop the others
        join_at = self._patience.join_at(now, new, size_of(self._here))
        if new and join_at <= now:
            self._ask(leave, why, found)
            return
        self._join_at = join_at if new else math.inf
        if new:
            self._say(
                f"{why}: {new} new slot{'s wait' if new > 1 else ' waits'} for the next start, for {join_at - now:.0f} "
                f"s at most, as hosts change often here and a start takes {self._patience.cost_s:.0f} s"
            )

    def _ask(self, leave: Callable[[float], None], why: str, found: list[Host]) -> None:
        """Ask the ranks to leave for other hosts."""
        if found:
            self._say(f"{why}: asking {words(self._here)} to save and end, for {words(found)}")
            self._patience.ask(time.monotonic())
        else:
            self._say(
                f"{why}, to fewer slots than --min-np {self._members.least}: the ranks save and end, and the job waits "
                "for more"
            )
        self.changing = True
        leave(self._leave_timeout)

    def take_note(self, note: dict[str, Any]) -> None:
        """Take what a rank says; what no rank says is left out."""
        for name, value in note.items():
            if type(value) is not int or value < 0:
                continue
            if name == rank_notes.BEGAN:
                self.speaks = True
                self._restarts.begin(value)
                self.saved = self._whole = value or -1  # also of a second training in the same process
            elif name == rank_notes.STEP:
                self._restarts.note_step(value)
                self._patience.step(time.monotonic())
            elif name == rank_notes.SAVED:
                self._restarts.note_step(value)
                self.saved = max(self.saved, value)
            elif name == rank_notes.WHOLE:
                self._whole = value
            elif name == rank_notes.LEFT:
                self.left, self.left_after = True, value
            elif name == rank_notes.MOST and value:
                self._members.possible = value
            elif name == rank_notes.SLOW:
                others = (rank_notes.SLOW_PERCENT, rank_notes.LEAST_ROWS, rank_notes.MOST_ROWS)
                numbers = [note.get(other, 0) for other in others]
                if all(type(number) is int for number in numbers):
                    self._slow.take(value, *numbers)

    def plan_rescue(self, held: Mapping[int, Sequence[HeldPart]], *, failed: bool) -> RescueOrder | None:
        """See `rannd.runner.watch.errand`: after failures, and if ranks have left without saving their last step."""
        if not failed and not self.left:
            return None
        order = plan_rescue(held, self._whole)
        if order is not None:
            self._say(f"saving step {order.step}, which the ranks have kept in memory")
        return order

    def end_rescue(self, order: RescueOrder, error: str) -> None:
        """See `rannd.runner.watch.errand`."""
        if error:
            before = f"step {self.saved}" if self.saved >= 0 else "none"
            self._say(f"step {order.step} cannot be saved to {order.folder}: {error}; the last checkpoint: {before}")
        else:
            self.rescued = order.folder
            self._restarts.note_step(order.step)


def _holds(found: Sequence[Host], here: Sequence[Host]) -> bool:
    """Whether all slots of `here` are among those of `found`."""
    slots = {host.name: host.slots for host in found}
    return all(host.slots <= slots.get(host.name, 0) for host in here)
