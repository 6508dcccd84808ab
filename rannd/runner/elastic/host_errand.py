"""What is done while the ranks of an elastic job run: its host file is read, and what the ranks tell is noted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rannd.ranks import rank_notes
from rannd.runner.elastic.host_file import LOOK_S, HostFile
from rannd.runner.elastic.members import Members, loses_this_machine, words
from rannd.runner.elastic.restarts import Restarts
from rannd.runner.elastic.slow_hosts import SlowHosts
from rannd.runner.resources.host_list import Host

_NEVER_S = 3600.0
STAYS = (
    "{} does not name this machine any more, but rannc-run itself runs here: the job goes on with the hosts that it "
    "had. To leave this machine, end rannc-run and start it elsewhere"
)


class HostErrand:
    """The errand of one start, see `rannd.runner.watch.errand`.

    Args:
        file: The host file; None: the hosts do not change.
        members: The hosts of the job.
        here: Those on which this start's ranks run.
        leave_timeout: Seconds that ranks get to save and end if hosts change.
        grace: The same after SIGTERM.
        restarts: What it counts steps for.
        say: Gets a line for the user.
        slow: Hears of slow hosts.
    """

    def __init__(
        self,
        file: HostFile | None,
        members: Members,
        here: Sequence[Host],
        leave_timeout: float,
        grace: float,
        restarts: Restarts,
        say: Callable[[str], None],
        slow: SlowHosts,
    ) -> None:
        self.leave_s = grace
        self._slow = slow
        self._file, self._members, self._here = file, members, list(here)
        self._leave_timeout, self._restarts, self._say = leave_timeout, restarts, say
        self._look_at = time.monotonic()
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

    def due(self) -> float:
        """Return when the file is looked at next."""
        return self._look_at

    def run(self, leave: Callable[[float], None]) -> None:
        """Look at the host file, and let the ranks leave if other ones are to run."""
        self._look_at = time.monotonic() + (_NEVER_S if self._file is None else LOOK_S)
        if self._file is None or self.changing or not self._file.changed():
            return
        named = self._file.hosts
        if loses_this_machine(self._members.named, named):
            self._say(STAYS.format(self._file.path))
            return
        self._members.name(named)
        self._slow.leave_out()
        found = self._members.chosen()
        if found == self._here:
            return
        if not found:
            self._say(
                f"{self._file.path} has changed, to fewer slots than --min-np {self._members.least}: the ranks save "
                "and end, and the job waits for more"
            )
        else:
            self._say(f"{self._file.path} has changed: asking {words(self._here)} to save and end, for {words(found)}")
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
                self.saved = max(self.saved, value or -1)
            elif name == rank_notes.STEP:
                self._restarts.note_step(value)
            elif name == rank_notes.SAVED:
                self._restarts.note_step(value)
                self.saved = max(self.saved, value)
            elif name == rank_notes.LEFT:
                self.left, self.left_after = True, value
            elif name == rank_notes.MOST and value:
                self._members.possible = value
            elif name == rank_notes.SLOW and type(percent := note.get(rank_notes.SLOW_PERCENT)) is int:
                self._slow.take(value, percent)
