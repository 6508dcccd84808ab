"""The hosts of an elastic job that are slower than the others: a file for the user, who is left out, who gets less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rannd.errors import LaunchError
from rannd.plain_file import PlainFile
from rannd.ranks.row_shares import RowShares
from rannd.runner.elastic.members import Members
from rannd.runner.resources.host_list import is_local

NAME = "slow_hosts"
"""Of the file: lines of a host and its time relative to the others', slowest first."""
MOST_PERCENT = 10**9
"""Scripts can say anything; floats cannot be everything."""
_FILE = PlainFile("list of slow hosts", "rannc-run --elastic", LaunchError, 1 << 20)


class SlowHosts:
    """What the ranks have said of slow hosts, in all starts of a job.

    Args:
        folder: Where the file is; it is made when there is a slow host.
        members: The hosts of the job.
        drop: Leave slow hosts out of the next start.
        say: Gets a line for the user.
    """

    def __init__(self, folder: Path, members: Members, drop: bool, say: Callable[[str], None]) -> None:
        self.file = folder / NAME
        self._members, self._drop, self._say = members, drop, say
        self._hosts: list[str] = []
        """Host of each rank of the present start."""
        self._factors: dict[str, float] = {}
        """What was said of hosts in all starts, for the file."""
        self._percents: dict[str, int] = {}
        """By which rows are divided."""
        self._bounds: tuple[int, int] | None = None
        """Minimum and maximum rows of a rank, as of `RowShares`; None: slow hosts get as many as others."""
        self._leaving: dict[str, float] = {}
        """Slow hosts that are left out of the next start."""

    def clear(self) -> None:
        """Remove an earlier job's file."""
        try:
            self.file.unlink(missing_ok=True)
        except OSError as error:
            self._say(f"an earlier job's {self.file} cannot be removed: {error.strerror}; remove it yourself")

    def begin(self, hosts: Sequence[str]) -> None:
        """Take the host of each rank of a start."""
        self._hosts = list(hosts)
        # Hosts that are left out may come back as new ones.
        self._percents = {host: percent for host, percent in self._percents.items() if host in self._hosts}

    def shares(self) -> RowShares | None:
        """Return what each rank of the present start is to get; None: all the same."""
        percents = tuple(self._percents.get(host, 100) for host in self._hosts)
        return RowShares(*self._bounds, percents) if self._bounds is not None and len(set(percents)) > 1 else None

    def even_out(self) -> None:
        """Let shares be even again: a start has failed at once, perhaps because they were not."""
        if self.shares() is not None:
            self._say("the next start has as many rows on slow hosts as on others")
            self._percents.clear()

    def take(self, rank: int, percent: int, least: int = 0, most: int = 0) -> None:
        """The host of a rank takes so many percent of the time of the others.

        100: it is as fast as they are again. `least` and `most` are as of `RowShares`; 0: shares are even.
        """
        if not rank < len(self._hosts) or not 100 <= percent <= MOST_PERCENT:  # no rank of ours says so
            return
        host, factor = self._hosts[rank], percent / 100
        if percent == 100:
            if self._percents.pop(host, None) is not None:
                self._say(f"host {host} computes as fast as the others again")
            return
        self._factors[host], self._percents[host] = factor, percent
        self._bounds = (least, most) if least > 0 and most > 0 else None
        written = self._write()
        if self._drop:
            self._leaving[host] = factor
            follows = "; it is left out of the next start (--drop-stragglers)"
        else:
            follows = "; its ranks get fewer rows from the next start on, if that helps" if self._bounds else ""
        self._say(f"host {host} computes {factor:.1f} times as long as the others{written}{follows}")

    def leave_out(self) -> None:
        """Leave slow hosts out of the start whose hosts are chosen next, but not this machine, nor too many."""
        for host in sorted(self._leaving, key=self._leaving.__getitem__, reverse=True):
            if is_local(host):
                self._say(f"{host} is slow, but stays: rannc-run itself runs here")
            elif not self._members.spare(host):
                self._say(f"{host} is slow, but stays: without it there are fewer slots than --min-np")
        self._leaving.clear()

    def _write(self) -> str:
        """Write the file; return words on where it is."""
        lines = [f"{host} {self._factors[host]:.2f}\n" for host in sorted(self._factors, key=self._factors.__getitem__)]
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            _FILE.write("".join(reversed(lines)).encode(), self.file)
        except (LaunchError, OSError) as error:
            return f" ({error})"
        return f" ({self.file})"
