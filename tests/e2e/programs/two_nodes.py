"""Ranks that believe to be on two nodes (ranks 0 and 1 on one, 2 on another): training, and both kinds of links."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from yardstick import RANK, Plain, network, train_alike

import pyrannc
from rannd.profile.costs import LinkCost
from rannd.profile.links import measure_links
from rannd.runtime.comm import world
from rannd.runtime.costs import profiler


def told(group: dist.ProcessGroup, device: torch.device, pair: tuple[int, int] = (0, 1)) -> LinkCost:
    """Measures, and tells what."""
    found = measure_links(group, device, pair)
    ranks = dist.get_process_group_ranks(group)
    print(f"measured {ranks[pair[0]]} and {ranks[pair[1]]} of {ranks}", flush=True)
    assert found.p2p_us(1e6) > 0
    assert found.allreduce_us(1e6, 2) > 0
    return found


profiler.measure_links = told
world.node_identity = lambda: f"node{0 if RANK < 2 else 1}"

os.environ["RANNC_PARTITION_NUM"] = "2"
plain = Plain(network(depth=6), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
inner = network(depth=6)
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
model = pyrannc.RaNNCModule(inner, optimizer)
train_alike(model, optimizer, plain, rows=[4, 3, 4])
made = world.made()
assert made is not None
print("places", [(slot.node, slot.device) for slot in made.slots], "agrees", flush=True)
