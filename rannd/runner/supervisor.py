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

import os
import time
from collections.abc import Mapping
from dataclasses import replace

from rannd.config import Config
from rannd.errors import LaunchError, UsageError
from rannd.runner.elastic.host_errand import HostErrand
from rannd.runner.elastic.host_file import HostFile
from rannd.runner.elastic.members import Members, size_of
from rannd.runner.elastic.restarts import Restarts
from rannd.runner.hints import hints
from rannd.runner.job import Job, prepare
from rannd.runner.report import exit_code
from rannd.runner.resources.host_list import Host, is_local
from rannd.runner.run_options import Options
from rannd.runner.starting import launch, not_ready, problem_table, say, tell_end
from rannd.runner.watch.job_result import JobResult

_WAIT_S = 0.5
"""Seconds between two looks for enough hosts."""
RESUME_STEP = "RANND_RESUME_STEP"
"""Variable with the step of the newest checkpoint that ranks have told of."""


class Supervisor:
    """Runs one elastic job.

    Args:
        options: What was asked for.
        items: The configuration, with the flags.
        environ: The environment of rannc-run.
        script: Path of the script, '' for a module.

    Raises:
        UsageError: The host file is wrong, or -np and a host file are given.
    """

    def __init__(self, options: Options, items: Config, environ: Mapping[str, str], script: str) -> None:
        self._options, self._items, self._environ, self._script = options, items, dict(environ), script
        self._file: HostFile | None = None
        if options.hostfile is not None:
            if options.size:
                raise UsageError(
                    f"-np {options.size} with --elastic and a host file, whose slots say how many ranks there are; use "
                    f"--max-np {options.size} for a maximum"
                )
            self._file = HostFile(options.hostfile, say)
        self._members = Members(items.min_np, items.max_np)
        self._restarts = Restarts(items.max_restarts)
        self._first = True
        self._saved = -1

    def run(self) -> int:
        """Run the job to its end; return the exit code of rannc-run.

        Raises:
            UsageError, LaunchError: As `prepare` and `launch` raise them for a job that is not elastic.
        """
        if self._file is not None:
            self._members.name(self._file.hosts)
        while True:
            hosts = self._gather()
            job = self._checked(self._prepared(hosts))
            if job is None:
                continue
            errand = HostErrand(
                self._file, self._members, hosts, self._items.leave_timeout, job.grace, self._restarts, say
            )
            if self._first and not job.quiet:
                for line in hints(self._options, job):
                    say(line)
            self._first = False
            result = launch(job, errand)
            self._saved = max(self._saved, errand.saved)
            code = self._judge(job, result, errand)
            if code is not None:
                return code

    # --- before a start ---------------------------------------------------------------------------

    def _gather(self) -> list[Host]:
        """Return the hosts of the next start, when there are enough; [] for those that `prepare` finds itself."""
        if self._file is None:
            return []
        told = False
        while True:
            if self._file.changed():
                self._members.name(self._file.hosts)
            found = self._members.chosen()
            if found:
                return found
            if not told:
                out = self._members.left_out
                without = f", without {', '.join(out)}" if out else ""
                say(
                    f"{self._file.path} has {sum(host.slots for host in self._file.hosts)} slots{without}; waiting for "
                    f"at least {self._items.min_np} (--min-np)"
                )
                told = True
            time.sleep(_WAIT_S)

    def _prepared(self, hosts: list[Host]) -> Job:
        options = self._options
        if hosts:
            named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
            options = replace(options, hosts=named, hostfile=None, size=size_of(hosts))
        job = prepare(options, self._environ)
        if self._file is not None:
            job = replace(job, hosts_from=str(self._file.path) if job.hosts_from else "")
        if self._saved >= 0:
            job = replace(job, added={**job.added, RESUME_STEP: str(self._saved)})
        return job

    def _checked(self, job: Job) -> Job | None:
        """Return the job if its hosts are ready; None if some are not, and are left out of the next try."""
        if not job.preflight:
            return job
        problems, job = not_ready(job, self._items, self._script)
        if not problems:
            return job
        hosts = {each.host for each in problems}
        text = problem_table(job, problems)
        if self._file is not None and hosts < {place.host for place in job.places}:
            say(f"{text}\nrannc-run: leaving out {', '.join(sorted(hosts))}")
            for host in hosts:
                self._members.leave_out(host)
        elif self._first or not self._wait(text):
            raise LaunchError(text)
        return None

    # --- after an end -----------------------------------------------------------------------------

    def _judge(self, job: Job, result: JobResult, errand: HostErrand) -> int | None:
        """Return the exit code if the job is over; None if it is to be started again."""
        code = exit_code(result)
        if result.signal:
            if errand.left:
                say(f"the ranks have saved step {errand.left_after} and ended")
            else:
                tell_end(job, result)
            return code
        if code == 0 and not errand.left and not (errand.changing and not errand.speaks):
            return 0
        if errand.left or errand.changing:
            self._say_left(errand)
            self._restarts.others()
            return None
        tell_end(job, result)
        lost = sorted({end.host for end in result.ends if end.lost})
        for host in lost:
            self._members.leave_out(self._named(host))
        if lost:
            self._restarts.others()
        return None if self._wait() else code

    def _wait(self, text: str = "") -> bool:
        """Count a failure, which `text` describes, and wait; False if there is no further start."""
        wait = self._restarts.fail()
        if wait is None:
            say(f"the job is not started again: {self._restarts.why()}")
            return False
        pause = f" in {wait:g} s" if wait else ""
        before = f"{text}\nrannc-run: " if text else ""
        say(f"{before}starting again{pause} (failure {self._restarts.failures} of at most {self._restarts.most})")
        time.sleep(wait)
        return True

    def _say_left(self, errand: HostErrand) -> None:
        if errand.left:
            say(f"the ranks have saved step {errand.left_after} and ended")
        elif errand.speaks:
            say("the ranks have ended before they could save; the training goes on from the last checkpoint")
        else:
            say("the ranks have ended")

    def _named(self, host: str) -> str:
        """Return the name in the host file of a host as its watcher names itself."""
        for each in self._members.named:
            if each.name == host or each.name.split(".")[0] == host or (is_local(each.name) and is_local(host)):
                return each.name
        return host


def run_elastic(options: Options, items: Config, script: str) -> int:
    """Run an elastic job; returns the exit code."""
    return Supervisor(options, items, os.environ, script).run()
