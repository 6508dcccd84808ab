"""Settings of torch on all ranks of a job, for the keys of what is measured and planned under them."""

from __future__ import annotations

import msgspec

from rannd import log
from rannd.daemon.common.keys import Component
from rannd.device.kernel_flags import Flag, kernel_flags
from rannd.runtime.comm.world import World

_FLAGS = msgspec.msgpack.Decoder(dict[str, Flag])


def job_flags(world: World) -> dict[str, Component]:
    """Each setting with its value, or with the values by rank where ranks differ, of which rank 0 warns. Collective.

    Each block is measured on one rank, with that rank's settings. With the values of all ranks in the keys, a job whose
    ranks differ does not leave its times to jobs whose ranks agree.
    """
    told = [_FLAGS.decode(data) for data in world.gather_bytes(msgspec.msgpack.encode(kernel_flags(world.device)))]
    found: dict[str, Component] = {}
    for name in dict.fromkeys(name for each in told for name in each):
        values = [each.get(name) for each in told]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        found[name] = values[0] if other is None else values
        if other is not None and world.rank == 0:
            log.get("RaNNCModule").warning(
                "Ranks have different settings of torch: %s is %s on rank 0, %s on rank %d. Their kernels differ in "
                "time and in results; set it alike on all ranks",
                name,
                values[0],
                values[other],
                other,
            )
    return found


def words(flags: dict[str, Component]) -> dict[str, str]:
    """The settings as texts, for files."""
    return {name: str(value) for name, value in flags.items()}
