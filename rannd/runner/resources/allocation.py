"""Hosts that a batch system or an operator has allocated to this job, from its environment variables.

==================  ==============================================  =============================================
source              variables                                       hosts and slots
==================  ==============================================  =============================================
an MPI host file    ``OMPI_MCA_orte_default_hostfile``,             the file's, as for ``--hostfile``; set for
                    ``PRTE_MCA_prte_default_hostfile``,             workers by Kubernetes' MPI operator
                    ``I_MPI_HYDRA_HOST_FILE``,
                    ``HYDRA_HOST_FILE``
Slurm               ``SLURM_JOB_NODELIST``: ``a[01-03,7],b2``       ``SLURM_TASKS_PER_NODE``: ``2(x3),1`` if
                                                                    tasks were requested, else
                                                                    ``SLURM_GPUS_ON_NODE`` on each
PBS, Torque         ``PBS_NODEFILE``: a file                        one line per slot
==================  ==============================================  =============================================

The first variable that is set is used. One that cannot be parsed is an error; ``--hosts`` avoids it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rannd.errors import UsageError
from rannd.runner.resources.host_list import Host, read_hostfile

#: Variables that give any MPI launcher its default host file.
HOSTFILE_VARIABLES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)

_HINT = "name the hosts yourself: --hosts a:4,b:4"
#: More nodes than any machine has: a larger range is a mistake, and must not fill the memory.
_MOST_NODES = 1 << 17


@dataclass(frozen=True)
class Allocation:
    """Hosts that a batch system or operator has chosen."""

    hosts: tuple[Host, ...]
    origin: str
    """The variables they come from, with their values."""
    slurm: bool = False
    """Whether Slurm's srun knows them without a list."""
    counted: bool = True
    """Whether the number of ranks per host was requested; False: it is a guess."""


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that `environ` describes, or None.

    Raises:
        UsageError: A variable, or a file that it names, cannot be parsed.
    """
    for name in HOSTFILE_VARIABLES:
        if environ.get(name):
            return Allocation(tuple(_of_file(name, environ[name])), f"{name}={environ[name]}")
    if environ.get("SLURM_JOB_NODELIST"):
        return _slurm(environ)
    if environ.get("PBS_NODEFILE"):
        path = environ["PBS_NODEFILE"]
        return Allocation(tuple(_of_nodefile(path)), f"PBS_NODEFILE={path}")
    return None


def _of_file(name: str, path: str) -> list[Host]:
    try:
        return read_hostfile(Path(path))
    except UsageError as error:
        raise UsageError(f"{name}={path}: {error}; or {_HINT}") from None


def _of_nodefile(path: str) -> list[Host]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"PBS_NODEFILE={path} cannot be read: {error}; {_HINT}") from None
    if not lines:
        raise UsageError(f"PBS_NODEFILE={path} names no host; {_HINT}")
    # A host's lines need not be adjacent; the first one determines its position.
    return [Host(name, slots) for name, slots in Counter(lines).items()]


def _slurm(environ: Mapping[str, str]) -> Allocation:
    nodes = expand_nodelist(environ["SLURM_JOB_NODELIST"], "SLURM_JOB_NODELIST")
    used = ["SLURM_JOB_NODELIST"]
    # Slurm always counts tasks; if none were requested (SLURM_NTASKS* is not set), the GPUs are more reliable.
    asked = "SLURM_NTASKS" in environ or "SLURM_NTASKS_PER_NODE" in environ
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    if not asked and gpus.isdecimal() and int(gpus) > 0:
        used.append("SLURM_GPUS_ON_NODE")
        slots = [int(gpus)] * len(nodes)
    elif environ.get("SLURM_TASKS_PER_NODE"):
        used.append("SLURM_TASKS_PER_NODE")
        slots = expand_counts(environ["SLURM_TASKS_PER_NODE"], "SLURM_TASKS_PER_NODE")
    elif environ.get("SLURM_NTASKS_PER_NODE"):
        used.append("SLURM_NTASKS_PER_NODE")
        slots = expand_counts(environ["SLURM_NTASKS_PER_NODE"], "SLURM_NTASKS_PER_NODE") * len(nodes)
    else:
        slots = [1] * len(nodes)
    origin = ", ".join(f"{name}={environ[name]}" for name in used)
    if len(slots) != len(nodes):
        raise UsageError(f"{origin}: {len(nodes)} nodes, but numbers of tasks for {len(slots)}; {_HINT}")
    hosts = tuple(Host(name, count) for name, count in zip(nodes, slots, strict=True))
    return Allocation(hosts, origin, slurm=True, counted=asked or "SLURM_GPUS_ON_NODE" in used)


def expand_nodelist(text: str, where: str) -> list[str]:
    """Expand a node list of Slurm: ``a[01-03,7],b2`` is a01, a02, a03, a7, b2.

    Args:
        text: The list; several brackets in one name give all combinations, the last bracket varying fastest.
        where: Name of the variable, for the error.

    Raises:
        UsageError: It is not such a list, or names a node twice.
    """
    nodes: list[str] = []
    try:
        for entry in _entries(text):
            nodes += _expanded(entry)
            if len(nodes) > _MOST_NODES:
                raise ValueError("too many nodes")
        if len(set(nodes)) < len(nodes):
            raise ValueError("a node is named twice")
    except ValueError as error:
        raise UsageError(f"{where}={text} is not understood ({error}); {_HINT}") from None
    return nodes


#: A name, possibly with brackets, up to the next comma outside of them.
_ENTRY = re.compile(r"(?:[^][,\s]|\[[^][\s]*\])+")
_BRACKET = re.compile(r"\[([^]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def _entries(text: str) -> Iterator[str]:
    position = 0
    while True:
        found = _ENTRY.match(text, position)
        if found is None:
            raise ValueError(f"no node at {text[position:]!r}")
        yield found.group()
        position = found.end()
        if position == len(text):
            return
        if text[position] != ",":
            raise ValueError(f"no comma at {text[position:]!r}")
        position += 1


def _expanded(entry: str) -> list[str]:
    bracket = _BRACKET.search(entry)
    if bracket is None:
        return [entry]
    before, rest = entry[: bracket.start()], _expanded(entry[bracket.end() :])
    numbers = list(_numbers(bracket[1]))
    if len(numbers) * len(rest) > _MOST_NODES:
        raise ValueError("too many nodes")
    return [f"{before}{number}{after}" for number in numbers for after in rest]


def _numbers(text: str) -> Iterator[str]:
    """Expand ``01-03,7`` to 01, 02, 03, 7: padded to the width of a range's first number."""
    for part in text.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"{part!r} is not a number or range")
        first, last = found[1], found[2] or found[1]
        if not int(first) <= int(last) < int(first) + _MOST_NODES:
            raise ValueError(f"{part!r} is not a range")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def expand_counts(text: str, where: str) -> list[int]:
    """Expand counts of Slurm: ``2(x3),1`` is 2, 2, 2, 1.

    Raises:
        UsageError: It is not such a list; `where` is the name of the variable.
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9][0-9]{0,5})(?:\(x([1-9][0-9]{0,5})\))?", part)
        if found is None:
            raise UsageError(f"{where}={text} is not understood ({part!r} is not a number of tasks); {_HINT}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts
