"""Environment variables in which a launcher tells a process its rank: the one list that all of rannd reads.

Standard library only: the ranks' watchers run without site-packages.
"""

from __future__ import annotations

WORLDS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)
"""Names of rank, size, local rank and local size of each kind of launcher; the first row whose rank and size are set
applies.

Slurm's size is that of the step: the script of sbatch has a SLURM_PROCID and the job's SLURM_NTASKS, and is no rank.
"""

PMIX = "PMIX_RANK"
"""The rank of a PMIx launcher, which tells no size: enough to name a process, not to be one of a job's ranks."""


def without_size(rank: str) -> str:
    """Message for a process that has a rank in `PMIX` and no size: it must not train alone."""
    return (
        f"this process was started as a rank by a PMIx launcher ({PMIX}={rank}) that does not say how many ranks there "
        "are. Start the script with rannc-run from outside that launcher, or set RANK, WORLD_SIZE, LOCAL_RANK, "
        f"MASTER_ADDR and MASTER_PORT for each rank; if this is the only process, unset {PMIX}"
    )


RANKS = (WORLDS[0][0], PMIX, *(rank for rank, *_ in WORLDS[1:]))
"""All variables with a rank, in the order in which they apply. MPI's come before Slurm's, which a whole batch script
inherits."""

MPI_RANKS = tuple(name for name in RANKS if name != "RANK")
"""Those of the launchers that rannc-run starts: mpirun, mpiexec and srun. RANK is none of theirs; it may come from the
environment around rannc-run."""
