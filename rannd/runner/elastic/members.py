"""Which of the named hosts take part in the next start of an elastic job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rannd.runner.resources.host_list import Host, is_local

RETRY_S = 300.0
"""Seconds after which a host that was lost, or was not ready, may take part again."""


@dataclass
class Members:
    """The hosts of a job.

    Args:
        least, most: Minimum and maximum number of ranks; 0: no maximum.
    """

    least: int
    most: int
    possible: int = 0
    """Number of ranks that the script has said it can have at most; 0: it has said nothing."""
    named: list[Host] = field(default_factory=list)
    _out: dict[str, tuple[Host, float]] = field(default_factory=dict)
    """Hosts that are left out, as they were named, and until when."""

    def name(self, hosts: Sequence[Host]) -> None:
        """Take the hosts that the user names now. A host that was left out is back if its entry is another one."""
        self.named = list(hosts)
        self._out = {name: (host, until) for name, (host, until) in self._out.items() if host in self.named}

    def leave_out(self, name: str, after_s: float = 0.0) -> None:
        """Leave a host out until `RETRY_S` after it goes in `after_s` seconds, or until its entry changes."""
        host = next((host for host in self.named if host.name == name), None)
        if host is not None:
            self._out[name] = host, time.monotonic() + after_s + RETRY_S

    def spare(self, name: str) -> bool:
        """Leave a host out as `leave_out` does, unless too few slots would be left; return whether it is left out."""
        before = dict(self._out)
        self.leave_out(name)
        if self.chosen():
            return True
        self._out = before
        return False

    @property
    def left_out(self) -> list[str]:
        """Hosts that do not take part, although they are named."""
        return [name for name, (_, until) in self._out.items() if time.monotonic() < until]

    def chosen(self) -> list[Host]:
        """Return the hosts of the next start with the slots that are used; [] if there are too few slots."""
        found: list[Host] = []
        out = {self._out[name][0] for name in self.left_out}
        free = min([limit for limit in (self.most, self.possible) if limit] or [size_of(self.named)])
        for host in self.named:
            slots = min(host.slots, free)
            if host not in out and slots:
                found.append(Host(host.name, slots))
                free -= slots
        return found if found and size_of(found) >= self.least else []


def loses_this_machine(before: Sequence[Host], after: Sequence[Host]) -> bool:
    """Whether this machine, where rannc-run itself runs, was one of the hosts, and is not any more."""
    return any(is_local(host.name) for host in before) and not any(is_local(host.name) for host in after)


def size_of(hosts: Sequence[Host]) -> int:
    """Number of ranks."""
    return sum(host.slots for host in hosts)


def words(hosts: Sequence[Host]) -> str:
    """Name hosts for the user: ``4 ranks on a:2, b:2``."""
    count = size_of(hosts)
    return f"{count} rank{'s' if count > 1 else ''} on {', '.join(f'{host.name}:{host.slots}' for host in hosts)}"
