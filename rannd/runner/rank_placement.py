"""Decides number and hosts of the ranks: from named hosts, the batch system, or this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rannd.errors import UsageError
from rannd.runner.resources import host_list
from rannd.runner.resources.allocation import Allocation, find_allocation
from rannd.runner.resources.host_list import Host, RankHost
from rannd.runner.run_options import Options


@dataclass(frozen=True)
class RankPlacement:
    """Number and hosts of the ranks of a job."""

    size: int
    """Number of ranks; for --plan-only the number to plan for."""
    places: list[RankHost]
    """Places of the ranks that are started."""
    hosts: list[Host]
    """Hosts for the launcher; empty: it starts all ranks on this machine."""
    origin: str
    """Source of the hosts: a flag, a variable, a line of the configuration, the batch system; empty: none."""
    by_srun: bool = False
    """Whether srun places the ranks: it knows its hosts without a list."""


def decide(options: Options, environ: Mapping[str, str], *, default: int, devices: int, srun: bool) -> RankPlacement:
    """Decide the size of a job and the places of its ranks.

    Args:
        options: Options of the job.
        environ: Variables of this process, including those of batch systems.
        default: Default number of ranks on this machine.
        devices: Devices per node of the cluster to plan for; 0: there is none.
        srun: Whether Slurm's srun starts the ranks.

    Raises:
        UsageError: Hosts are wrong, or have fewer slots than the job has ranks.
    """
    named = _named(options)
    if options.plan_only:
        given = _understood(environ)
        return _one(options, named, given, devices or _unasked(given, default))
    if named is not None:
        size = options.size or _slots(named)
        places = host_list.place(size, named.hosts)
        return RankPlacement(size, places, _for_launcher(named, _understood(environ)), named.origin)
    given = find_allocation(environ)
    if given is None or _is_here(given):
        # The slots of a single machine do not limit -np.
        size = options.size or _unasked(given, default)
        return RankPlacement(size, _here(size), [], given.origin if given is not None else "")
    size = options.size or _slots(given)
    if size > _slots(given):
        each = -(-size // len(given.hosts))
        raise UsageError(
            f"-np {size} asks for more ranks than the batch system gives slots ({_slots(given)}, from {given.origin}); "
            f"ask it for more, or name the hosts: --hosts {','.join(f'{host.name}:{each}' for host in given.hosts)}"
        )
    places = host_list.place(size, given.hosts)
    if srun and given.slurm:
        return RankPlacement(size, places, list(given.hosts), given.origin, by_srun=True)
    used = {place.host for place in places}
    return RankPlacement(size, places, [host for host in given.hosts if host.name in used], given.origin)


def _named(options: Options) -> Allocation | None:
    """Return the hosts that the user has named, if any."""
    name = "hosts" if options.hosts is not None else "hostfile"
    if options.hosts is None and options.hostfile is None:
        return None
    if options.plan_only and options.by_flag(name):
        raise UsageError("--plan-only needs no hosts; give the number of devices with -np")
    try:
        if options.hosts is not None:
            hosts = host_list.parse_hosts(options.hosts)
        else:
            assert options.hostfile is not None
            hosts = host_list.read_hostfile(options.hostfile)
    except UsageError as error:
        raise error if options.by_flag(name) else UsageError(f"{options.origin(name)}: {error}") from None
    return Allocation(tuple(hosts), options.origin(name))


def _understood(environ: Mapping[str, str]) -> Allocation | None:
    """Return the batch system's hosts where they are optional: None if they cannot be parsed."""
    try:
        return find_allocation(environ)
    except UsageError:
        return None


def _slots(allocation: Allocation) -> int:
    return sum(host.slots for host in allocation.hosts)


def _is_here(allocation: Allocation) -> bool:
    return all(host_list.is_local(host.name) for host in allocation.hosts)


def _here(size: int) -> list[RankHost]:
    return host_list.place(size, [Host(os.uname().nodename.split(".")[0], size)])


def _for_launcher(named: Allocation, given: Allocation | None) -> list[Host]:
    """Return the named hosts; [] if all are this machine, unless a batch system could make the launcher leave it."""
    return [] if _is_here(named) and (given is None or _is_here(given)) else list(named.hosts)


def _one(options: Options, named: Allocation | None, given: Allocation | None, unasked: int) -> RankPlacement:
    """Place the single rank of --plan-only: on this machine, or where the batch system allows it."""
    size = options.size or (_slots(named) if named is not None else unasked)
    if given is None or _is_here(given):
        return RankPlacement(size, _here(1), [], "")
    own = next((host.name for host in given.hosts if host_list.is_local(host.name)), given.hosts[0].name)
    hosts = [Host(own, 1)]
    return RankPlacement(size, host_list.place(1, hosts), hosts, given.origin)


def _unasked(given: Allocation | None, default: int) -> int:
    """Return the default size of a job. A single slot means nothing: a shell of srun --pty has one, too."""
    slots = _slots(given) if given is not None else 0
    return slots if slots > 1 else default
