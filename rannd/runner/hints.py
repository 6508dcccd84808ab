"""Hints at the start of a job: what its command may have been meant to say."""

from __future__ import annotations

from rannd.runner.job import Job
from rannd.runner.run_options import Options

_OURS = frozenset({"-np", "--nproc", "--hosts", "--hostfile", "--plan-only", "--dry-run", "--show-ranks"})
"""Options of rannc-run that hardly any script has, too."""


def hints(options: Options, job: Job) -> list[str]:
    """Lines for the user; none for most jobs."""
    lines = []
    script, *arguments = options.command
    ours = next((word for word in arguments if word.partition("=")[0] in _OURS), None)
    if ours is not None:
        lines.append(
            f"{ours} behind {script} is an argument of the script; options of rannc-run come before it: rannc-run "
            f"{ours} .. {script}"
        )
    alone = len(job.places) == 1 and not job.gpus and not job.hosts_from
    if alone and options.size is None and not options.plan_only:
        lines.append("there is no GPU, and -np is not given: starting one rank; -np 2 starts two")
    return lines
