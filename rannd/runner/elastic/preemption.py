"""What an elastic job does when it is told that a host is going away (``rannc-run notify-preempt``).

::

    notice: c goes in 120 s
      │  c is left out of all starts from now on
      ├── ranks run on c: they train on, are asked to save and end `LEAD_S` before c goes, and go on without it
      ├── no ranks run on c: that is all
      └── c is the machine of rannc-run, or there is no host file: they save and end in the same way, and the job ends
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rannd.runner.elastic.host_errand import HostErrand
from rannd.runner.elastic.members import Members, words
from rannd.runner.resources.host_list import Host, RankHost, is_local
from rannd.runner.watch.errand import HeldPart, RescueOrder
from rannd.runner.watch.notice_socket import LONGEST_ANSWER, Notice, Noticed, NoticeSocket

LEAD_S = 20.0
"""Seconds before a host goes at which its ranks are asked to save and end; until then they train."""
_LOOK_S = 0.25
"""Seconds between two looks for notices."""
_HERE = ""
"""The machine on which rannc-run runs, in place of its name."""


class Preemptions:
    """The notices of one job, from before its first start to its end; `beside` makes the errand of one start.

    Args:
        members: The hosts of the job.
        changing: Whether its hosts can change: it has a host file.
        leave_timeout: Seconds that ranks get to save and end if hosts change.
        grace: The same after SIGTERM; they get as much, too, if less is left.
        say: Gets a line for the user.
    """

    def __init__(
        self, members: Members, changing: bool, leave_timeout: float, grace: float, say: Callable[[str], None]
    ) -> None:
        self._members, self._changing, self._say = members, changing, say
        self._leave_timeout, self._grace = leave_timeout, grace
        self._socket: NoticeSocket | None = None
        self._start: NoticeErrand | None = None
        self._ends_at: float | None = None
        """When the job loses a machine that it cannot do without."""

    def open(self) -> None:
        """Begin to listen; a line says where that is not possible."""
        try:
            self._socket = NoticeSocket()
        except OSError as error:
            self._say(f"notify-preempt is not heard: {error}")

    def close(self) -> None:
        """Listen no more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def over(self) -> bool:
        """Whether it is time to end the job."""
        return self._ends_at is not None and time.monotonic() >= self._ends_at - LEAD_S

    def beside(self, errand: HostErrand, hosts: Sequence[Host], places: Sequence[RankHost]) -> NoticeErrand:
        """Return the errand of a start, which does what `errand` does, and what notices ask for.

        Args:
            hosts: The hosts of the start, as the host file names them; [] without a host file.
            places: Where its ranks run.
        """
        self._start = NoticeErrand(self, errand, hosts, places)
        return self._start

    def pause(self, seconds: float) -> None:
        """Wait between two starts, and hear notices meanwhile; not after it is time to end the job."""
        self._start = None
        until = time.monotonic() + seconds
        while True:
            self.hear()
            left = until - time.monotonic()
            if left <= 0 or self.over:
                return
            time.sleep(min(left, _LOOK_S))

    def hear(self) -> None:
        """Take the notices that were given on this machine."""
        if self._socket is not None:
            for notice in self._socket.hear():
                self._socket.answer(self.take(notice, _HERE))

    def take(self, notice: Notice, given_on: str) -> Noticed:
        """Take a notice that was given on a host; return the answer."""
        host = self._known(notice.host or given_on)
        if host is None:
            has = ", ".join(self._names()[:20]) or "this machine"
            return Noticed(False, f"{notice.host} is not one of the hosts of this job: {has}"[:LONGEST_ANSWER])
        if host == _HERE:
            text = self._ends(notice.seconds, "rannc-run itself runs there")
        elif not self._changing:
            text = self._ends(notice.seconds, "there is no host file that could name other hosts")
        else:
            text = self._goes(host, notice.seconds)
        self._say(f"notice: {host or 'this machine'} goes in {notice.seconds:g} s: {text}")
        return Noticed(True, text[:LONGEST_ANSWER])

    def act(self, start: NoticeErrand, leave: Callable[[float], None]) -> None:
        """Ask the ranks of a start to leave if it is time."""
        gone_at = self._ends_at if self.over else start.gone_at
        if gone_at is None or start.ending or time.monotonic() < gone_at - LEAD_S:
            return
        found = self._members.chosen()
        if self.over:
            start.ending = True
            then = "and the job ends"
        elif start.leaving or found == start.hosts:  # asked already; or the host was named anew
            start.gone_at = None
            return
        else:
            then = f"for {words(found)}" if found else "and the job waits for hosts"
        left = max(0.0, gone_at - time.monotonic())
        self._say(f"a host goes in {left:.0f} s: asking the ranks to save and end, {then}")
        start.ask(leave, min(self._leave_timeout, max(left, self._grace)))

    def _names(self) -> list[str]:
        if self._changing:
            return [host.name for host in self._members.named]
        return list(dict.fromkeys(self._start.names)) if self._start is not None else []

    def _known(self, name: str) -> str | None:
        """Return a host by its name in the job, with or without domain; None: the job does not have it."""
        if name == _HERE or is_local(name):
            return _HERE
        names = self._names()
        alike = [each for each in names if each.split(".")[0] == name.split(".")[0]]
        return name if name in names else alike[0] if len(alike) == 1 else None

    def _ends(self, seconds: float, why: str) -> str:
        """The job ends with a machine; return what it does."""
        self._ends_at = _sooner(self._ends_at, seconds)
        return f"{why}: {self._when(self._ends_at)}, and the job ends (exit code 143); its next run goes on from there"

    def _goes(self, host: str, seconds: float) -> str:
        """The job loses a host; return what it does."""
        self._members.leave_out(host, seconds)
        found, start = self._members.chosen(), self._start
        short = f"without {host} the job has fewer slots than --min-np {self._members.least}"
        if start is None or host not in start.names:
            return f"no ranks run on {host}, and the next start leaves it out" + ("" if found else f"; {short}")
        start.gone_at = _sooner(start.gone_at, seconds)
        when = self._when(start.gone_at)
        return f"{when}, and go on without {host}, as {words(found)}" if found else f"{when}; {short}, and waits"

    def _when(self, gone_at: float) -> str:
        if self._start is None:
            return "no ranks run"
        if self._start.leaving:
            return "the ranks save and end already"
        wait = gone_at - LEAD_S - time.monotonic()
        return f"the ranks save and end in {wait:.0f} s" if wait > 0 else "the ranks save and end now"


class NoticeErrand:
    """The errand of one start that also does what notices ask for, see `Preemptions.beside`."""

    def __init__(
        self, notices: Preemptions, errand: HostErrand, hosts: Sequence[Host], places: Sequence[RankHost]
    ) -> None:
        self.leave_s, self.rescue_s = errand.leave_s, errand.rescue_s
        self.hosts = list(hosts)
        self.names = [place.host for place in places]
        """The host of each rank."""
        self.gone_at: float | None = None
        """When the first of the hosts goes on which its ranks run."""
        self.ending = False
        """The ranks were asked to leave because the job ends."""
        self._notices, self._errand = notices, errand
        self._look_at = time.monotonic()

    @property
    def leaving(self) -> bool:
        """Whether the ranks were asked to save and end, because of a notice or of other hosts."""
        return self._errand.changing

    def due(self) -> float:
        """Return when there may be something to do."""
        return min(self._look_at, self._errand.due())

    def run(self, leave: Callable[[float], None]) -> None:
        """Run the other errand if it is due, hear notices, and do what they ask for when it is time."""
        if time.monotonic() >= self._errand.due():
            self._errand.run(leave)
        self._look_at = time.monotonic() + _LOOK_S
        self._notices.hear()
        self._notices.act(self, leave)

    def take_note(self, note: dict[str, Any]) -> None:
        """Pass on what a rank says."""
        self._errand.take_note(note)

    def plan_rescue(self, held: Mapping[int, Sequence[HeldPart]], *, failed: bool) -> RescueOrder | None:
        """Return what is to be saved of that which the ranks have left in memory."""
        return self._errand.plan_rescue(held, failed=failed)

    def end_rescue(self, order: RescueOrder, error: str) -> None:
        """Pass on how that has ended."""
        self._errand.end_rescue(order, error)

    def take_notice(self, notice: Notice, rank: int) -> Noticed:
        """Take a notice that was given on the machine of a rank."""
        return self._notices.take(notice, self.names[rank])

    def ask(self, leave: Callable[[float], None], seconds: float) -> None:
        """Ask the ranks to save and end."""
        self._errand.changing = True
        leave(seconds)


def _sooner(before: float | None, seconds: float) -> float:
    moment = time.monotonic() + seconds
    return moment if before is None else min(before, moment)
