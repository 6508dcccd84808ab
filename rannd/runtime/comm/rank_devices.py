"""Which devices and processors the ranks of a job have, as they tell each other, and so which slot each rank gets."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rannd.errors import LaunchError
from rannd.plan.deployment import Slot
from rannd.ranks.host_name import host_name


class RankDevice(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the others of itself."""

    host: str
    node: str
    """Identifier of its machine."""
    kind: str
    """Type of its device."""
    index: int
    """Index of its device in its process; on the CPU its place on the node."""
    identity: str
    """What the device is known by on its node; '' for the CPU."""
    transport: str
    cores: Sequence[int] = ()
    """Processors that it may run on."""


def slots_of(ranks: Sequence[RankDevice], *, shared: bool) -> list[Slot]:
    """Slots of all ranks: node and device. Where devices have the same index in their processes, ranks are counted.

    Raises:
        LaunchError: Ranks have different kinds of devices or transports, or, unless `shared`, the same device.
    """
    for name, found in (("device", {each.kind for each in ranks}), ("transport", {each.transport for each in ranks})):
        if len(found) > 1:
            raise LaunchError(
                f"ranks use different kinds of {name}s ({', '.join(sorted(found))}); set {name}= to the same on all "
                "ranks"
            )
    owners: dict[tuple[str, str], int] = {}
    for rank, each in enumerate(ranks):
        other = owners.setdefault((each.node, each.identity), rank) if each.identity else rank
        if other != rank and not shared:
            raise LaunchError(
                f"ranks {other} and {rank} on {each.host} share a device ({each.identity}); start at most one rank per "
                "device (or set transport=staged, which is slow, to try a plan)"
            )
    nodes: dict[str, int] = {}
    for each in ranks:
        nodes.setdefault(each.node, len(nodes))
    indices = [(nodes[each.node], each.index) for each in ranks]
    if len(set(indices)) == len(indices):
        return [Slot(*each) for each in indices]
    counts = dict.fromkeys(nodes.values(), 0)
    slots = []
    for node, _ in indices:
        slots.append(Slot(node, counts[node]))
        counts[node] += 1
    return slots


def node_identity() -> str:
    """Identifier of this machine: boot ID and host name, because containers may share a machine's host name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{boot}/{host_name()}"
