"""Variables that a launcher has left in this process's environment: the rank they describe, and their removal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rannd.errors import UsageError
from rannd.ranks import core_share, rank_notes, row_shares
from rannd.ranks.rank_variables import PMIX, WORLDS, slurm_local_size, without_size
from rannd.runner.resources.allocation import HOSTFILE_VARIABLES

_PREFIXES = (
    "OMPI_COMM_WORLD_",
    "OMPI_WORLD_",
    "OMPI_APP_CTX_",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte_ess_",
    "PMI_",
    "PMIX_",
    "PRTE_MCA_ess",
    "HYDRA_BSTRAP_",
    "I_MPI_INFO_",
    "SLURM_STEP_",
    "SLURM_CPU_BIND",
    "SLURM_MEM_BIND",
    "SLURM_SRUN_COMM_",
    "TORCHELASTIC_",
)
_NAMES = frozenset(
    {
        *HOSTFILE_VARIABLES,
        rank_notes.VARIABLE,
        rank_notes.RESUME_STEP,
        rank_notes.RESCUED_FOLDER,
        row_shares.VARIABLE,
        core_share.BEFORE_VARIABLE,
        *(name for world in WORLDS for name in world if name != "SLURM_NTASKS_PER_NODE"),
        "OMPI_ARGV",
        "OMPI_COMMAND",
        "OMPI_FILE_LOCATION",
        "OMPI_FIRST_RANKS",
        "OMPI_LIBDIR_LOC",
        "OMPI_MCA_PREFIXES",
        "OMPI_MCA_cpu_type",
        "OMPI_MCA_initial_wdir",
        "OMPI_MCA_num_procs",
        "OMPI_MCA_orte_app_num",
        "OMPI_MCA_orte_hnp_uri",
        "OMPI_MCA_orte_launch",
        "OMPI_MCA_orte_local_daemon_uri",
        "OMPI_MCA_orte_num_nodes",
        "OMPI_NUM_APP_CTX",
        "OMPI_TOOL_NAME",
        "OMPI_UNIVERSE_SIZE",
        "OMPI_VERSION",
        "PRTE_LAUNCHED",
        "PRTE_SHARED_FS",
        "HYDI_CONTROL_FD",
        "HYDRA_LAUNCH_TYPE",
        "I_MPI_HYDRA_UUID",
        "I_MPI_MPIRUN",
        "I_MPI_PIN_INFO",
        "I_MPI_PIN_MAPPING",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "SLURM_GTIDS",
        "SLURM_LAUNCH_NODE_IPADDR",
        "SLURM_NODEID",
        "SLURM_STEPID",
        "SLURM_TASK_PID",
    }
)
#: Variables that users set themselves, although they begin like those of a launcher.
_USERS = ("PMIX_MCA_",)


@dataclass(frozen=True)
class Rank:
    """A rank in a job that another launcher has started."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    """Ranks on this machine, None if not known."""
    starter: str
    """Name of the launcher, for messages."""
    by_srun: bool = False
    """Whether srun placed the rank itself, not the daemon of an MPI that srun has started."""


def rank_here(environ: Mapping[str, str]) -> Rank | None:
    """Return the rank that this process was started as, or None.

    A batch script of sbatch has a SLURM_PROCID, too, but no SLURM_STEP_NUM_TASKS: it is not a rank.

    Raises:
        UsageError: The variables are not numbers, or do not include the number of ranks.
    """
    for rank, size, local_rank, local_size in WORLDS:
        if rank not in environ or size not in environ:
            continue
        texts = environ[rank], environ[size], environ.get(local_rank, environ[rank])
        if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
            raise UsageError(
                f"{rank}={texts[0]}, {size}={texts[1]}: the rank must be a number below the size; "
                "unset them, or restart the job"
            )
        by_srun = _by_srun(rank, texts, environ)
        local = slurm_local_size(environ) if by_srun else environ.get(local_size, "")
        return Rank(
            rank=int(texts[0]),
            size=int(texts[1]),
            local_rank=int(texts[2]),
            local_size=int(local) if local.isdecimal() else None,
            starter=_starter(rank, environ),
            by_srun=by_srun,
        )
    if PMIX in environ:
        raise UsageError(without_size(environ[PMIX]))
    return None


def _by_srun(variable: str, texts: tuple[str, str, str], environ: Mapping[str, str]) -> bool:
    """Whether srun itself placed this rank: not an MPI launcher or torchrun whose daemons srun started."""
    if variable == "PMI_RANK":
        own = (environ.get("SLURM_PROCID"), environ.get("SLURM_STEP_NUM_TASKS")) == texts[:2]
        return own and "HYDI_CONTROL_FD" not in environ and "I_MPI_HYDRA_UUID" not in environ
    return variable == "SLURM_PROCID"


def _starter(variable: str, environ: Mapping[str, str]) -> str:
    if variable == "OMPI_COMM_WORLD_RANK":
        return "Open MPI's mpirun"
    if variable == "SLURM_PROCID":
        return "Slurm's srun"
    if variable == "PMI_RANK":
        if "I_MPI_HYDRA_UUID" in environ:
            return "Intel MPI's mpirun"
        if "HYDI_CONTROL_FD" in environ:
            return "MPICH's mpiexec"
        return "Slurm's srun" if "SLURM_STEP_NUM_TASKS" in environ else "mpiexec"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "whoever set RANK and WORLD_SIZE"


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables that launchers set for one rank, and without their default host files.

    A launcher inside a rank of another one could otherwise take itself for a part of that one, and so could the ranks
    that
    it starts: torchrun's RANK has priority over srun's. Slurm's variables of the job stay: they are the allocation.
    """
    left = {
        name: value
        for name, value in environ.items()
        if name not in _NAMES and (not name.startswith(_PREFIXES) or name.startswith(_USERS))
    }
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun itself listens there
        left.pop("MASTER_ADDR", None)
        left.pop("MASTER_PORT", None)
    return left
