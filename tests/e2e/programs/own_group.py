"""own_group.py WHEN: a script as for torchrun, which makes its process group before or after wrapping, or never.

It trains with a DistributedSampler and reduces its losses itself; gradients are those of one process, on any number
of ranks.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import init_process_group
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from yardstick import Plain, batches, network, raises, same, same_parameters

import pyrannc
from rannd.errors import UsageError

WHEN = sys.argv[1]
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
place = [int(os.environ[name]) for name in NAMES]

if WHEN == "before":
    init_process_group("gloo")
inner = network()
plain = Plain(inner, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
model = pyrannc.RaNNCModule(inner, optimizer)
if WHEN == "after":
    raises(UsageError, "rannd has made the default process group already", lambda: dist.init_process_group("mpi"))
    raises(UsageError, "without world_size=9", lambda: dist.init_process_group(rank=place[0], world_size=9))
    init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
assert place[:2] == [rank, size], place

data = TensorDataset(torch.cat(batches(0, [4] * (2 * size))))
sampler = DistributedSampler(data, shuffle=True)
assert plain.optimizer is not None
for epoch in range(2):
    sampler.set_epoch(epoch)
    others = [DistributedSampler(data, size, each) for each in range(size)]
    for each in others:
        each.set_epoch(epoch)
    loaders = [DataLoader(data, batch_size=4, sampler=each) for each in others]
    for (x,), *given in zip(DataLoader(data, batch_size=4, sampler=sampler), *loaders, strict=True):
        optimizer.zero_grad()
        plain.optimizer.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        plain.backward([rows for (rows,) in given])
        same_parameters(model, plain.model, f"epoch {epoch}")
        total = loss.detach().clone()
        dist.all_reduce(total)
        same(total, sum(plain.model(rows).pow(2).sum() for (rows,) in given), "the loss of all ranks")
        optimizer.step()
        plain.optimizer.step()
dist.barrier()
state = model.state_dict()
if rank == 0:
    for name, value in plain.model.state_dict().items():
        same(state[name], value, name)
if WHEN != "never":
    dist.destroy_process_group()
    if size > 1:
        raises(UsageError, "destroy_process_group() has ended the communication", model.state_dict)
print("trained", place, flush=True)
