"""Environment variables in which a launcher tells a process its rank: the one list that all of rannd reads.

Standard library only: the ranks' watchers run without site-packages.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def as_torchrun(rank: int, size: int, local_rank: int, local_size: int | None) -> dict[str, str]:
    """Variables in which torchrun tells a process its rank, for scripts that read them; `local_size` None: unknown."""
    values = zip(WORLDS[2], (rank, size, local_rank, local_size), strict=True)
    return {name: str(value) for name, value in values if value is not None}


def torch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """`as_torchrun` of a rank that an MPI launcher or srun has started, {} of any other process.

    Local numbers may be those of another row: srun with PMI sets PMI_RANK, and its own SLURM_LOCALID.
    """
    started = [world for world in WORLDS if world[0] != "RANK"]
    found = next(((environ[rank], environ[size]) for rank, size, *_ in started if {rank, size} <= environ.keys()), None)
    if found is None or not all(text.isdecimal() for text in found):
        return {}
    local = next((environ[world[2]] for world in started if environ.get(world[2], "").isdecimal()), found[0])
    sizes = [environ.get(world[3], "") for world in started[:-1]] + [slurm_local_size(environ)]
    local_size = next((int(text) for text in sizes if text.isdecimal()), None)
    return as_torchrun(int(found[0]), int(found[1]), int(local), local_size)


def slurm_local_size(environ: Mapping[str, str]) -> str:
    """Number of srun's ranks on this node, from ``SLURM_STEP_TASKS_PER_NODE=2(x3),1``; '' if it is not known."""
    counts: list[str] = []
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = part.partition("(x")
        times = times.removesuffix(")") or "1"
        if not (count.isdecimal() and times.isdecimal()):
            return ""
        counts += [count] * int(times)
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else ""
