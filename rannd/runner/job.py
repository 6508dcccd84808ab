"""Derives a fully decided job from the command line, before anything starts."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import rannd
from rannd.errors import LaunchError, UsageError
from rannd.ranks.core_count import core_count
from rannd.runner.launch.mpi import Launcher, LauncherKind, command_line, find_launcher, launcher_variables, search_path
from rannd.runner.rank_placement import decide
from rannd.runner.resources import host_list
from rannd.runner.resources.inherited import without_rank
from rannd.runner.resources.rank_environment import forwarded_names, meeting_point, tuning
from rannd.runner.run_options import Options, rank_command
from rannd.runner.watch.line_channel import address_towards
from rannd.runner.watch.watcher import SETTINGS_VARIABLE, shielded

if TYPE_CHECKING:  # imported only if a cluster is named: it imports msgspec
    from rannd.config.cluster import Cluster

#: -I and -S: neither the user's directory nor site-packages can change or slow the watcher.
_WATCHER = "import sys; sys.path.append(sys.argv.pop(1)); from rannd.runner.watch.watcher import main; main()"


@dataclass(frozen=True)
class Job:
    """A job to start."""

    launcher: Launcher
    places: list[host_list.RankHost]
    hosts: list[host_list.Host]
    """Empty if all ranks run on this machine, and no batch system could put them elsewhere."""
    hosts_from: str
    """Source of the hosts: a flag, a variable, a line of the configuration, the batch system; empty: none."""
    gpus: int
    """Number of GPUs of this machine."""
    added: dict[str, str]
    """Variables to add to the user's environment."""
    placed_by_slurm: bool
    """Whether srun places the ranks, without a list of hosts."""
    tuning_line: str
    rank_command: list[str]
    shown: frozenset[int]
    log_dir: str | None
    """The log directory of this run, which does not exist yet, or None."""
    grace: float
    start: float
    preflight: bool
    """Check that the other machines have what a rank needs, before anything starts."""
    quiet: bool = False
    """Say no more than warnings and errors."""

    @property
    def remote_host(self) -> str | None:
        """One of the other machines, None if there is none."""
        return next((host.name for host in self.hosts if not host_list.is_local(host.name)), None)

    def launcher_command(self) -> list[str]:
        """Return the command line of the MPI launcher, with the watcher around each rank."""
        root = os.path.dirname(os.path.dirname(os.path.abspath(rannd.__file__)))
        watcher = [sys.executable, "-I", "-S", "-c", _WATCHER, root, *shielded(self.rank_command)]
        forwarded = forwarded_names({*self.environment(os.environ), SETTINGS_VARIABLE})
        hosts = [] if self.placed_by_slurm else self.hosts
        return command_line(self.launcher, len(self.places), hosts, forwarded, watcher)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of launcher and ranks, derived from `environ`."""
        return without_rank(environ) | self.added

    def describe(self) -> str:
        """Return the output of ``--dry-run``: host, device and command of each rank, then what all ranks share."""
        lines = []
        for place in self.places:
            device = f"cuda:{place.local_rank % self.gpus}" if self.gpus else "cpu"
            command = shlex.join(self.rank_command)
            lines.append(f"rank {place.rank}: host {place.host}, local rank {place.local_rank}, {device}: {command}")
        if self.hosts_from:
            lines.append(f"hosts: from {self.hosts_from}{'; srun places the ranks' if self.placed_by_slurm else ''}")
        lines.append("variables added to the environment:")
        lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(self.added.items())]
        forgotten = sorted(os.environ.keys() - self.environment(os.environ).keys())
        if forgotten:
            lines.append(f"variables of another launcher removed from it: {' '.join(forgotten)}")
        lines.append(f"launcher: {self.launcher.version}")
        lines.append(f"  {shlex.join(self.launcher_command())}")
        return "\n".join(lines)


def prepare(options: Options, environ: Mapping[str, str]) -> Job:
    """Decide all details of the job; inspects this machine, but starts nothing.

    Raises:
        UsageError: The script does not exist, or hosts or ranks are wrong.
        ConfigError: The cluster to plan for is not known, or its file is wrong.
        LaunchError: No MPI launcher is installed.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(f"the working directory cannot be used: {error}; change to an existing one") from None
    command = rank_command(options)
    gpus = host_list.gpu_count(environ)
    cores = core_count()
    cluster = _cluster(options)
    launcher = find_launcher(environ)
    placement = decide(
        options,
        environ,
        default=host_list.default_size(gpus, cores),
        devices=cluster.devices_per_node if cluster is not None else 0,
        srun=launcher.kind is LauncherKind.SRUN,
    )
    size, places = placement.size, placement.places
    environ = without_rank(environ)
    added = launcher_variables(launcher.kind, environ, root=os.geteuid() == 0)
    if launcher.kind is LauncherKind.INTEL:
        added["PATH"] = search_path(launcher.path, environ)
    added |= meeting_point(environ, _first_address(places[0].host, placement.hosts))
    if "PYTHONUNBUFFERED" not in environ:
        added["PYTHONUNBUFFERED"] = "1"
    added |= options.variables()
    if options.plan_only:
        added["RANNC_PARTITIONING_DRY_RUN_NP"] = str(size)
    if cluster is not None and options.cluster is not None:
        from rannd.config.cluster import cluster_file

        cluster.places(size)  # refuses more nodes than the cluster can have, before anything starts
        added["RANNC_PARTITIONING_DRY_RUN_CLUSTER"] = str(cluster_file(options.cluster).absolute())
        if "RANNC_DEVICE" not in environ:
            added["RANNC_DEVICE"] = "cpu"  # the model is only traced, nothing runs on a device
    tuning_line = ""
    if options.tune:
        local_ranks = max(place.local_rank for place in places) + 1
        binds = cores == len(os.sched_getaffinity(0))  # a container's quota is of no certain cores
        tuned = tuning(environ, cores=cores, local_ranks=local_ranks, gpus=gpus, binds=binds)
        added |= tuned.variables
        tuning_line = tuned.line()

    log_dir = None
    if options.log_dir is not None:
        run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        log_dir = str(options.log_dir.absolute() / run)
    return Job(
        launcher,
        places,
        placement.hosts,
        placement.origin,
        gpus,
        added,
        placement.by_srun,
        tuning_line,
        command,
        _shown(options, len(places)),
        log_dir=log_dir,
        grace=options.grace,
        start=options.start,
        preflight=options.preflight,
        quiet=options.quiet,
    )


def _cluster(options: Options) -> Cluster | None:
    if options.cluster is None:
        return None
    if not options.plan_only:
        raise UsageError(f"--cluster {options.cluster} is only for planning; add --plan-only, or leave out --cluster")
    from rannd.config.cluster import load_cluster

    return load_cluster(options.cluster)


def _first_address(first: str, hosts: list[host_list.Host]) -> str | None:
    """Return the address of rank 0's host for other hosts, None if all ranks are on this machine."""
    if not hosts:
        return None
    remote = next((host.name for host in hosts if not host_list.is_local(host.name)), None)
    if remote is None or not host_list.is_local(first):
        return first
    try:
        return address_towards(remote)  # other hosts may take its name for their own: localhost, 127.0.1.1
    except LaunchError:
        return first


def _shown(options: Options, size: int) -> frozenset[int]:
    """Parse the ranks of ``0,2-3``; all ranks if nothing is given.

    Raises:
        UsageError: It is not a list of ranks, or a rank is not in the job.
    """
    flag = options.by_flag("show_ranks")
    if options.shown is None or (options.plan_only and not flag):
        return frozenset(range(size))
    told = f"--show-ranks {options.shown}" if flag else f"{options.origin('show_ranks')}: show_ranks = {options.shown}"
    ranks: set[int] = set()
    for entry in options.shown.split(","):
        first, dash, last = entry.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"{told}: {entry!r} is not a rank; write ranks and ranges as in 0,2-3")
        if int(last or first) >= size and not options.fewer_ranks:  # before a mistyped range fills the memory
            ranks.clear()
            break
        ranks |= set(range(int(first), min(int(last or first) + 1, size)))
    if options.fewer_ranks:
        return frozenset(ranks or {0})
    if not ranks:
        raise UsageError(f"{told}: the job has ranks 0 to {size - 1}")
    return frozenset(ranks)
