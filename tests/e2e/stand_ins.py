"""Commands that pages name and this machine lacks: each does here what it would have done on a cluster.

What is tested is rannd's part: the script of sbatch runs under the variables of an allocation, a container's command
runs without the container.
"""

from __future__ import annotations

from pathlib import Path

import fork_server
from job import SCRIPTS
from runner import stand_in_srun

_SBATCH = """\
#!/bin/sh
# As on the one node of an allocation with two tasks.
export SLURM_JOB_ID=4711 SLURM_JOB_NODELIST="$(uname -n)" SLURM_NNODES=1 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=2
export SLURM_TASKS_PER_NODE=2 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0
exec bash "$@"
"""
_CONTAINER = """\
#!/bin/sh
while [ "$1" != rannc-run ]; do shift || exit 64; done
exec "$@"
"""
_KUBECTL = """\
#!/bin/sh
[ "$1 $2" = "apply -f" ] && [ -f "$3" ]
"""
_FORKING = """\
#!/bin/sh
for word; do
    shift
    case $word in *.py) set -- "$@" {forks} "$word" ;; *) set -- "$@" "$word" ;; esac
done
exec {program} "$@"
"""


def install_forking(folder: Path, *names: str) -> None:
    """The project's own commands `names`, whose scripts are run by forks, in a folder that is there."""
    for name in names:
        (folder / name).write_text(_FORKING.format(forks=fork_server.__file__, program=Path(SCRIPTS, name)))
        (folder / name).chmod(0o755)


def install(folder: Path) -> Path:
    """The folder, which is made, with srun, sbatch, docker, apptainer and kubectl in it."""
    stand_in_srun.install(folder, folder / "srun.json")
    for name, text in (("sbatch", _SBATCH), ("docker", _CONTAINER), ("apptainer", _CONTAINER), ("kubectl", _KUBECTL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
