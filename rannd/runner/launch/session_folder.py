"""Temporary directory for Open MPI's session files, one per job.

Open MPI names its session directory after the pid of mpirun. A killed mpirun leaves it behind, and a later mpirun that
gets the same pid fails ("The PMIx server's listener thread failed to start"): this happens on machines whose pids end
at 32768.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

from rannd.runner.launch.mpi import LauncherKind
from rannd.runner.watch.processes import remove_folder

VARIABLE = "PRTE_MCA_prte_local_tmpdir_base"
_OF_USERS = (VARIABLE, "PRTE_MCA_prte_tmpdir_base")


def make(kind: LauncherKind, environ: Mapping[str, str]) -> dict[str, str]:
    """Create the directory and return its variable for Open MPI; {} for other launchers, or if the user set one."""
    if kind is not LauncherKind.OPEN_MPI or any(name in environ for name in _OF_USERS):
        return {}
    try:
        return {VARIABLE: tempfile.mkdtemp(prefix="rannc-run-")}
    except OSError:
        return {}  # Open MPI will report what is wrong with the temporary directory


def remove(made: Mapping[str, str]) -> None:
    """Remove what `make` created, if no guard could."""
    if VARIABLE in made and os.path.lexists(made[VARIABLE]):
        remove_folder(made[VARIABLE])
