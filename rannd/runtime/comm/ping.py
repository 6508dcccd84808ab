"""Program that `rannc-run --check` runs on two ranks or more: rank 0 prints hosts, latency and bandwidth as JSON."""

from __future__ import annotations

import msgspec
import torch

from rannd import config as configuration
from rannd.device.identity import device_model
from rannd.profile.links import measure_links
from rannd.runtime.comm.world import current

MARK = "rannd ping "
"""Prefix of the printed line."""


class Ping(msgspec.Struct, frozen=True):
    """Result of the measurement: latency in microseconds, bandwidth in bytes per microsecond."""

    torch: str
    device: str
    hosts: list[str]
    latency_us: float
    bytes_per_us: float


def main() -> None:
    """Measure and print the result. Needs at least two ranks; collective."""
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
