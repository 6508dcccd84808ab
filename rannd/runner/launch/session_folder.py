"""A directory of its own for what Open MPI keeps on this machine while a job runs.

Open MPI names that directory by the pid of mpirun. One that was killed leaves it behind, and a later mpirun that
happens to get the same pid then fails ("The PMIx server's listener thread failed to start"): on a machine whose pids
end at 32768 that does happen.
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
    """The variable with a new directory, for Open MPI's mpirun; nothing for others, or where the user has named one."""
    if kind is not LauncherKind.OPEN_MPI or any(name in environ for name in _OF_USERS):
        return {}
    try:
        return {VARIABLE: tempfile.mkdtemp(prefix="rannc-run-")}
    except OSError:
        return {}  # Open MPI will say what is wrong with the place


def remove(made: Mapping[str, str]) -> None:
    """Remove what `make` has made, where no guard could."""
    if VARIABLE in made and os.path.lexists(made[VARIABLE]):
        remove_folder(made[VARIABLE])
