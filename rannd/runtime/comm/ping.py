"""The ranks of `rannc-run --check`: where they are, and how fast they talk. Rank 0 prints it as a line of JSON."""

from __future__ import annotations

import msgspec
import torch

from rannd import config as configuration
from rannd.profile.links import measure_links
from rannd.runtime.comm.device import device_model
from rannd.runtime.comm.world import current

MARK = "rannd ping "
"""What the line begins with."""


class Ping(msgspec.Struct, frozen=True):
    """What the ranks found. Microseconds, and bytes for each of them."""

    torch: str
    device: str
    hosts: list[str]
    latency_us: float
    bytes_per_us: float


def main() -> None:
    """Measure, with two ranks or more. Collective."""
    world = current(configuration.load())
    assert world.forward is not None, "a ping needs two ranks"
    link = measure_links(world.forward, world.device)
    if world.rank == 0:
        found = Ping(
            str(torch.__version__),
            device_model(world.device),
            list(world.hosts),
            link.p2p_latency_us,
            link.p2p_bytes_per_us,
        )
        print(MARK + msgspec.json.encode(found).decode(), flush=True)


if __name__ == "__main__":
    main()
