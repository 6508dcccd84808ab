"""From the command line to a job whose every detail is decided, before anything starts."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import rannd
from rannd.errors import UsageError
from rannd.runner import hosts as placing
from rannd.runner.environment import forwarded_names, meeting_point, tuning
from rannd.runner.mpi import Kind, Launcher, command_line, find_launcher, launcher_variables, search_path
from rannd.runner.rank import SETTINGS_VARIABLE

if TYPE_CHECKING:  # imported where a cluster is named: it brings msgspec along
    from rannd.config.cluster import Cluster

#: Set in a process that is a rank already, and by whom.
_RANK_MARKS = {
    "OMPI_COMM_WORLD_RANK": "Open MPI's mpirun",
    "PMIX_RANK": "a PMIx launcher",
    "PMI_RANK": "mpiexec or srun",
    "TORCHELASTIC_RUN_ID": "torchrun",
}
#: -I and -S: neither the user's directory nor site-packages can change or slow the watcher.
_WATCHER = "import sys; sys.path.append(sys.argv.pop(1)); from rannd.runner.rank import main; main()"


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    command: tuple[str, ...]
    """The script or module and its arguments."""
    size: int | None = None
    module: bool = False
    hosts: str | None = None
    hostfile: Path | None = None
    config: Path | None = None
    tune: bool = True
    shown: str | None = None
    log_dir: Path | None = None
    grace: float = 10.0
    start: float = 300.0
    """Seconds in which all ranks have to have started, 0: as long as it takes."""
    plan_only: bool = False
    cluster: str | None = None
    """Name or file of the devices to plan for."""


@dataclass(frozen=True)
class Job:
    """What is to be started."""

    launcher: Launcher
    places: list[placing.Place]
    hosts: list[placing.Host]
    """Empty where all ranks run on this machine."""
    gpus: int
    """Of this machine."""
    added: dict[str, str]
    """Variables beyond the user's own."""
    tuning_line: str
    rank_command: list[str]
    shown: frozenset[int]
    log_dir: str | None
    """The directory of this run, which is not made yet, or None."""
    grace: float
    start: float

    @property
    def remote_host(self) -> str | None:
        """One of the other machines, None where there is none."""
        return next((host.name for host in self.hosts if not placing.is_local(host.name)), None)

    def launcher_command(self) -> list[str]:
        """The command line of the MPI launcher, with the watcher around each rank."""
        root = os.path.dirname(os.path.dirname(os.path.abspath(rannd.__file__)))
        watcher = [sys.executable, "-I", "-S", "-c", _WATCHER, root, *self.rank_command]
        forwarded = forwarded_names({*os.environ, *self.added, SETTINGS_VARIABLE})
        return command_line(self.launcher, len(self.places), self.hosts, forwarded, watcher)

    def describe(self) -> str:
        """What ``--dry-run`` prints: each rank's host, device and command, then what all share."""
        lines = []
        for place in self.places:
            device = f"cuda:{place.local_rank % self.gpus}" if self.gpus else "cpu"
            command = shlex.join(self.rank_command)
            lines.append(f"rank {place.rank}: host {place.host}, local rank {place.local_rank}, {device}: {command}")
        lines.append("environment beyond your own:")
        lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(self.added.items())]
        lines.append(f"launcher: {self.launcher.version}")
        lines.append(f"  {shlex.join(self.launcher_command())}")
        return "\n".join(lines)


def prepare(options: Options, environ: Mapping[str, str]) -> Job:
    """Decides everything; looks at this machine, starts nothing that stays.

    Raises:
        UsageError: the script is not there, the hosts or ranks are wrong, or this process is a rank already.
        ConfigError: the cluster to plan for is not known, or its file is wrong.
        LaunchError: no MPI launcher is installed.
    """
    _refuse_inside_a_job(environ)
    rank_command = _rank_command(options)
    hosts = _hosts(options)
    gpus = placing.gpu_count(environ)
    cores = placing.core_count()
    cluster = _cluster(options)
    size = (
        options.size
        or (cluster.devices_per_node if cluster else 0)
        or sum(host.slots for host in hosts)
        or placing.default_size(gpus, cores)
    )
    started = 1 if options.plan_only else size
    places = placing.place(started, hosts or [placing.Host(os.uname().nodename.split(".")[0], started)])
    if all(placing.is_local(host.name) for host in hosts):
        hosts = []

    launcher = find_launcher(environ)
    added = launcher_variables(launcher.kind, environ, root=os.geteuid() == 0)
    if launcher.kind is Kind.INTEL:
        added["PATH"] = search_path(launcher.path, environ)
    added |= meeting_point(environ, places[0].host if hosts else None)
    if "PYTHONUNBUFFERED" not in environ:
        added["PYTHONUNBUFFERED"] = "1"
    if options.config is not None:
        added["RANNC_CONF_FILE"] = str(options.config.absolute())
    if options.plan_only:
        added["RANNC_PARTITIONING_DRY_RUN_NP"] = str(size)
    if cluster is not None and options.cluster is not None:
        from rannd.config.cluster import cluster_file

        cluster.places(size)  # refuses more nodes than the cluster can have, before anything starts
        added["RANNC_PARTITIONING_DRY_RUN_CLUSTER"] = str(cluster_file(options.cluster).absolute())
        if "RANNC_DEVICE" not in environ:
            added["RANNC_DEVICE"] = "cpu"  # the model is traced, nothing of it runs on a device
    tuning_line = ""
    if options.tune:
        local_ranks = max(place.local_rank for place in places) + 1
        tuned = tuning(environ, cores=cores, local_ranks=local_ranks, gpus=gpus)
        added |= tuned.variables
        tuning_line = tuned.line()

    log_dir = None
    if options.log_dir is not None:
        run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        log_dir = str(options.log_dir.absolute() / run)
    shown = _shown(options.shown, started)
    return Job(
        launcher,
        places,
        hosts,
        gpus,
        added,
        tuning_line,
        rank_command,
        shown,
        log_dir=log_dir,
        grace=options.grace,
        start=options.start,
    )


def _refuse_inside_a_job(environ: Mapping[str, str]) -> None:
    for name, launcher in _RANK_MARKS.items():
        if name in environ:
            raise UsageError(
                f"this process was started as a rank by {launcher} ({name}={environ[name]}); rannc-run starts ranks "
                "itself. Put 'python train.py' there instead of 'rannc-run train.py', or call rannc-run outside"
            )


def _rank_command(options: Options) -> list[str]:
    if not options.command:
        what = "module" if options.module else "script"
        raise UsageError(
            f"no {what} was named; write rannc-run -np 2 {'-m pkg.train' if options.module else 'train.py'}"
        )
    if options.module:
        return [sys.executable, "-m", *options.command]
    script = Path(options.command[0])
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise UsageError(f"{script} is a directory without __main__.py; name a Python script")
    if not script.exists():
        hint = "rannc-run takes the script itself" if script.name.startswith("python") else "is the path right?"
        raise UsageError(f"there is no script {script} in {Path.cwd()}; {hint}")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {script} cannot be read; check its permissions")
    return [sys.executable, *options.command]


def _cluster(options: Options) -> Cluster | None:
    if options.cluster is None:
        return None
    if not options.plan_only:
        raise UsageError(
            f"--cluster {options.cluster} says what to plan for, and nothing is run there; add --plan-only, or leave "
            "--cluster away"
        )
    from rannd.config.cluster import load_cluster

    return load_cluster(options.cluster)


def _hosts(options: Options) -> list[placing.Host]:
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError(f"both --hosts {options.hosts} and --hostfile {options.hostfile} are given; leave one away")
    if options.plan_only and (options.hosts is not None or options.hostfile is not None):
        raise UsageError("--plan-only needs no hosts; say for how many devices with -np")
    if options.hosts is not None:
        return placing.parse_hosts(options.hosts)
    if options.hostfile is not None:
        return placing.read_hostfile(options.hostfile)
    return []


def _shown(text: str | None, size: int) -> frozenset[int]:
    """The ranks of ``0,2-3``; all where nothing is given.

    Raises:
        UsageError: it is no list of ranks, or one of them is not in the job.
    """
    if text is None:
        return frozenset(range(size))
    ranks: set[int] = set()
    for entry in text.split(","):
        first, dash, last = entry.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"--show-ranks {text}: {entry!r} is no rank; write ranks and ranges as in 0,2-3")
        ranks |= set(range(int(first), int(last or first) + 1))
    if not ranks or max(ranks) >= size:
        raise UsageError(f"--show-ranks {text}: the job has ranks 0 to {size - 1}")
    return frozenset(ranks)
