"""rannc-run inside a rank that another launcher has started: the process becomes that rank.

::

    mpirun -np 4 rannc-run train.py      each of the four turns into ``python train.py``, in its own process
    srun rannc-run train.py              the same
    srun --pty bash, then rannc-run      a world of one is not adopted: rannc-run starts ranks of its own
"""

from __future__ import annotations

import os
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from rannd.errors import UsageError
from rannd.ranks.core_count import core_count
from rannd.ranks.rank_variables import as_torchrun
from rannd.runner.resources import host_list
from rannd.runner.resources.allocation import expand_nodelist
from rannd.runner.resources.inherited import Rank
from rannd.runner.resources.rank_environment import LOWEST_PORT, tuning
from rannd.runner.run_options import ELASTIC, FLAGS, Options, rank_command

#: Flags that only affect ranks which rannc-run starts itself.
_OWN_RANKS = ("log_dir", "show_ranks", "grace_period", "timeout_start", *ELASTIC)


@dataclass(frozen=True)
class Adopted:
    """The rank that this process becomes, its command and environment."""

    here: Rank
    command: list[str]
    added: dict[str, str]
    """Variables to add to the environment."""
    lines: list[str]
    """Lines that rank 0 prints."""

    def describe(self) -> str:
        """Return the output of ``--dry-run``."""
        who = f"rank {self.here.rank} of {self.here.size}, started by {self.here.starter}: {shlex.join(self.command)}"
        added = [f"  {name}={shlex.quote(value)}" for name, value in sorted(self.added.items())]
        return "\n".join([who, "variables added to the environment:", *added])


def adopt(options: Options, here: Rank, environ: Mapping[str, str]) -> Adopted:
    """Decide command and environment of the rank.

    Raises:
        UsageError: The script does not exist, or flags ask for a job other than the running one.
    """
    command = rank_command(options)
    _refuse_another_job(options, here)
    # No PYTHONUNBUFFERED, which writes line ends separately: nothing keeps the lines of these ranks together.
    added = options.variables() | as_torchrun(here.rank, here.size, here.local_rank, here.local_size)
    added |= _meeting_point(environ, here)
    who = f"already rank {here.rank} of {here.size}, started by {here.starter}"
    lines = [] if options.quiet else [f"{who}: running {options.command[0]} as it"]
    idle = [FLAGS[name] for name in _OWN_RANKS if options.by_flag(name)]
    if idle:
        lines.append(f"{', '.join(idle)} have no effect here: they only affect ranks that rannc-run starts itself")
    if options.tune:
        gpus = host_list.gpu_count(environ)
        if here.local_size is None:
            # The number of ranks that share these cores is not known: threads stay as they are.
            tuned = tuning({**environ, "OMP_NUM_THREADS": ""}, cores=1, local_ranks=1, gpus=gpus)
        else:
            cores = _cores(environ, here.local_size)
            tuned = tuning(environ, cores=cores, local_ranks=here.local_size, gpus=gpus)
        added |= tuned.variables
        if tuned.line() and not options.quiet:
            lines.append(tuned.line())
    return Adopted(here, command, added, lines)


def _refuse_another_job(options: Options, here: Rank) -> None:
    who = f"this process is rank {here.rank} of {here.size} already, started by {here.starter}"
    if options.plan_only:
        raise UsageError(f"{who}, and --plan-only plans in one process: call it once, outside that job")
    if options.size not in (None, here.size) and options.by_flag("nproc"):
        raise UsageError(f"-np {options.size}, but {who}; leave out -np to run as that rank, or call rannc-run outside")
    for name, value in (("hosts", options.hosts), ("hostfile", options.hostfile)):
        if value is not None and options.by_flag(name):
            raise UsageError(
                f"{FLAGS[name]} {value}, but {who}; leave it out to run as that rank, or call rannc-run outside"
            )


def _cores(environ: Mapping[str, str], local_ranks: int) -> int:
    """Return the cores that the ranks of this machine share. A rank that its launcher has pinned sees only its own."""
    if environ.get("SLURM_CPUS_PER_TASK", "").isdecimal():
        return int(environ["SLURM_CPUS_PER_TASK"]) * local_ranks
    pinned = len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    return core_count() * (local_ranks if pinned else 1)


def _meeting_point(environ: Mapping[str, str], here: Rank) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, the same in each rank without communication; {} where that is not possible.

    A port derived from the number of the job: ranks could agree on a free one only by MPI, which works under srun only
    if both were built for it. Variables set by the user are kept.
    """
    name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    if here.by_srun and environ.get(name):
        nodes = expand_nodelist(environ[name], name)
        address = nodes[0] if len(nodes) > 1 else "127.0.0.1"  # rank 0 is on the first node of the step
        job = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    elif here.local_size == here.size and environ.get("PMIX_NAMESPACE") and not here.by_srun:
        address, job = "127.0.0.1", environ["PMIX_NAMESPACE"]  # Open MPI's name of the job
    else:
        return {}
    wanted = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(LOWEST_PORT + zlib.crc32(os.fsencode(job)) % (32768 - LOWEST_PORT)),
    }
    return {each: value for each, value in wanted.items() if each not in environ}
