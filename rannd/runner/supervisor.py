"""Starts the ranks of an elastic job again and again, until the training is over or cannot go on.

::

                 ┌──────────────── hosts, back-off ─────────────────┐
                 ▼                                                  │
    gather ──► check ──► run ──┬── hosts change ──► save, leave ────┤
      │                        ├── a rank or host fails ────────────┘
      │ too few slots          ├── every rank ends with 0 ──► over
      └─ waits for the file    └── Ctrl-C, SIGTERM, too many failures ──► end
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType
from typing import NoReturn, TypeVar

from rannd.config import Config, config_directory
from rannd.errors import LaunchError, UsageError
from rannd.ranks import row_shares
from rannd.ranks.rank_notes import RESCUED_FOLDER, RESUME_STEP
from rannd.runner.elastic.host_errand import STAYS, History, HostErrand
from rannd.runner.elastic.host_file import HostFile
from rannd.runner.elastic.members import Members, loses_this_machine, size_of
from rannd.runner.elastic.patience import Patience
from rannd.runner.elastic.preemption import Preemptions
from rannd.runner.elastic.restarts import Restarts
from rannd.runner.elastic.slow_hosts import SlowHosts
from rannd.runner.hints import hints
from rannd.runner.job import Job, prepare
from rannd.runner.report import exit_code
from rannd.runner.resources.host_list import Host
from rannd.runner.run_options import Options
from rannd.runner.starting import launch, not_ready, problem_table, say, tell_end
from rannd.runner.watch.job_result import JobResult

_T = TypeVar("_T")
_WAIT_S = 0.5
"""Seconds between two looks for enough hosts."""
_NOTICES = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that end a job whose ranks do not run; while they run, the monitor handles them."""


class _Ended(Exception):
    """The job was ended while no ranks ran, by a signal, or as by one."""

    def __init__(self, signum: int, why: str = "") -> None:
        self.signum = signum
        self.why = why or signal.Signals(signum).name


class Supervisor:
    """Runs one elastic job.

    Args:
        options: What was asked for.
        items: The configuration, with the flags.
        environ: The environment of rannc-run.
        script: Path of the script, '' for a module.

    Raises:
        UsageError: The host file is wrong, or flags contradict each other.
    """

    def __init__(self, options: Options, items: Config, environ: Mapping[str, str], script: str) -> None:
        self._items, self._environ, self._script = items, dict(environ), script
        self._options = replace(options, fewer_ranks=True)
        self._file: HostFile | None = None
        if options.hostfile is not None:
            if options.size:
                raise UsageError(
                    f"-np {options.size} with --elastic and a host file, whose slots say how many ranks there are; use "
                    f"--max-np {options.size} for a maximum"
                )
            self._file = HostFile(options.hostfile, say)
        self._members = Members(items.min_np, items.max_np)
        if self._file is not None:
            self._members.name(self._file.hosts)
        changing, leave_timeout = self._file is not None, items.leave_timeout
        self._notices = Preemptions(self._members, changing, leave_timeout, items.grace_period, say)
        self._restarts = Restarts(items.max_restarts)
        folder = options.log_dir if options.log_dir is not None else config_directory(self._environ)
        self._slow = SlowHosts(folder.absolute(), self._members, items.drop_stragglers, say)
        self._history = History(self._restarts, Patience(), self._slow)
        if items.drop_stragglers and self._file is None:
            say(f"drop_stragglers = true ({items.origin('drop_stragglers')}) has no effect without a host file")
        self._first = True
        self._saved = -1
        self._rescued = ""

    def first(self) -> Job:
        """Return the job as it would be started now.

        Raises:
            UsageError, LaunchError: As `prepare` raises them.
        """
        return self._prepared(self._members.chosen())

    def run(self) -> int:
        """Run the job to its end; return the exit code of rannc-run.

        Raises:
            UsageError, LaunchError: The first start cannot be made, or a later one has failed too often.
        """
        before = {signum: signal.getsignal(signum) for signum in _NOTICES}
        self._slow.clear()
        try:
            for signum, handler in before.items():
                if handler != signal.SIG_IGN:
                    signal.signal(signum, _end)
            self._notices.open()
            while (code := self._start()) is None:
                pass
            return code
        except (_Ended, KeyboardInterrupt) as exc:
            end = exc if isinstance(exc, _Ended) else _Ended(signal.SIGINT)
            say(f"{end.why}: no ranks run, the job is not started again")
            return 128 + end.signum
        finally:
            self._notices.close()
            for signum, handler in before.items():
                signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def _start(self) -> int | None:
        """Start the ranks once; return the exit code if the job is over."""
        hosts = self._gather()
        job = self._tried(lambda: self._checked(self._prepared(hosts)))
        if job is None:
            return None
        self._slow.begin([place.host for place in job.places])
        if (shares := self._slow.shares()) is not None:
            job = replace(job, added={**job.added, row_shares.VARIABLE: shares.text()})
        times = self._items.leave_timeout, job.grace
        errand = HostErrand(self._file, self._members, hosts, *times, self._history, say)
        if self._first and not job.quiet:
            for line in hints(self._options, job):
                say(line)
        began = time.monotonic()
        result = self._tried(lambda: launch(job, self._notices.beside(errand, hosts, job.places)))
        self._first = False
        if result is None:
            return None
        self._saved = max(self._saved, errand.saved)
        self._rescued = errand.rescued or self._rescued
        return self._judge(job, result, errand, time.monotonic() - began)

    # --- before a start ---------------------------------------------------------------------------

    def _gather(self) -> list[Host]:
        """Return the hosts of the next start, when there are enough; [] for those that `prepare` finds itself."""
        if self._file is None:
            return []
        self._slow.leave_out()
        told = False
        while True:
            if self._file.changed():
                if loses_this_machine(self._members.named, self._file.hosts):
                    say(STAYS.format(self._file.path))
                else:
                    self._members.name(self._file.hosts)
            found = self._members.chosen()
            if found:
                return found
            if not told:
                out = self._members.left_out
                without = f", without {', '.join(out)}" if out else ""
                slots = size_of(self._members.named)
                say(
                    f"{self._file.path} has {slots} slot{'s' if slots > 1 else ''}{without}; waiting for at least "
                    f"{self._items.min_np} (--min-np)"
                )
                told = True
            self._pause(_WAIT_S)

    def _prepared(self, hosts: list[Host]) -> Job:
        options = self._options
        if hosts:
            named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
            options = replace(options, hosts=named, hostfile=None, size=size_of(hosts))
        job = prepare(options, self._environ)
        if self._file is None:
            job = self._bounded(job)
        elif job.hosts_from:
            job = replace(job, hosts_from=str(self._file.path))
        if self._saved >= 0:
            job = replace(job, added={**job.added, RESUME_STEP: str(self._saved)})
        if self._rescued:
            job = replace(job, added={**job.added, RESCUED_FOLDER: self._rescued})
        return job

    def _bounded(self, job: Job) -> Job:
        """Return a job without a host file that has as many ranks as it may have."""
        size, least, most = len(job.places), self._items.min_np, self._items.max_np
        if size < least:
            raise UsageError(f"a job of {size} rank{'s' if size > 1 else ''}, fewer than --min-np {least}; start more")
        if not most or size <= most:
            return job
        if self._options.size:
            raise UsageError(f"-np {size} is more than --max-np {most}; leave one of them out")
        return prepare(replace(self._options, size=most), self._environ)

    def _checked(self, job: Job) -> Job | None:
        """Return the job if its hosts are ready; None if some are not, and are left out of the next try.

        LaunchError if none is.
        """
        if not job.preflight:
            return job
        problems, job = not_ready(job, self._items, self._script)
        if not problems:
            return job
        hosts = {each.host for each in problems}
        text = problem_table(job, problems)
        if self._file is None or not hosts < {place.host for place in job.places}:
            raise LaunchError(text)
        say(f"{text}\nrannc-run: leaving out {', '.join(sorted(hosts))}")
        for host in hosts:
            self._members.leave_out(host)
        return None

    def _tried(self, what: Callable[[], _T]) -> _T | None:
        """Return the result of what the first start has to be able to do; None if a later one was not, and waits."""
        try:
            return what()
        except (UsageError, LaunchError) as error:
            if self._first or not self._wait(text=str(error)):
                raise
            return None

    # --- after an end -----------------------------------------------------------------------------

    def _judge(self, job: Job, result: JobResult, errand: HostErrand, ran_s: float) -> int | None:
        """Return the exit code if the job is over; None if it is to be started again."""
        code = exit_code(result)
        leaving = errand.left or errand.changing
        asked = (-signal.SIGUSR1, 128 + signal.SIGUSR1)  # a script without a handler
        if not leaving or any(end.status not in asked for end in result.failures):
            tell_end(job, result)
        if errand.left or (leaving and not result.signal):
            self._say_left(errand)
        if result.signal:
            return code
        if leaving and (code or errand.left or not errand.speaks):
            self._restarts.others()
            return 128 + signal.SIGTERM if self._notices.over else None
        if code == 0:
            return 0
        lost = {job.places[end.rank].host for end in result.ends if end.lost}
        for host in lost:
            self._members.leave_out(host)
        if lost:
            self._restarts.others()
        return None if self._wait(ran_s) else code

    def _wait(self, ran_s: float = 0.0, text: str = "") -> bool:
        """Count a failure, which `text` describes, and wait; False if there is no further start."""
        wait = self._restarts.fail(ran_s)
        if wait is None:
            say(f"the job is not started again: {self._restarts.why()}")
            return False
        if self._restarts.barren:
            self._slow.even_out()
        pause = f" in {wait:g} s" if wait else ""
        before = f"{text}\nrannc-run: " if text else ""
        say(f"{before}starting again{pause} (failure {self._restarts.failures} of at most {self._restarts.most})")
        self._pause(wait)
        return True

    def _pause(self, seconds: float) -> None:
        """Wait, and hear notices meanwhile."""
        self._notices.pause(seconds)
        if self._notices.over:
            raise _Ended(signal.SIGTERM, "a notice")

    def _say_left(self, errand: HostErrand) -> None:
        newest = f"the newest checkpoint is of step {errand.saved}" if errand.saved >= 0 else "there is no checkpoint"
        if errand.left and errand.saved == errand.left_after:
            say(f"the ranks have saved step {errand.saved} and ended")
        elif errand.left:
            say(f"the ranks have ended after step {errand.left_after}; {newest}")
        elif errand.speaks:
            say(f"the ranks have ended; {newest}")
        else:
            say("the ranks have ended")


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    raise _Ended(signum)
