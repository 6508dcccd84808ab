"""What `pyrannc.profile` measures and leaves alone. Prints how many blocks, of which numbers of rows."""

from __future__ import annotations

import sys

import torch
from torch import nn
from yardstick import RANK, network, raises

import pyrannc
from rannd.errors import UsageError

ROWS, DEPTH = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 6

model = network(depth=DEPTH)
before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
found = pyrannc.profile(model, torch.ones(ROWS, 8, dtype=torch.float64))
print(f"rank {RANK}: {len(found.blocks)} blocks, rows {found.rows}", flush=True)
assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
assert all(parameter.grad is None for parameter in model.parameters())
again = pyrannc.profile(model, {"input": torch.ones(ROWS, 8, dtype=torch.float64)})
assert set(again.blocks) == set(found.blocks)
raises(UsageError, "not a int", lambda: pyrannc.profile(1, torch.ones(1)))  # type: ignore[arg-type]

# A model that was profiled is wrapped and trained as any other.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped = pyrannc.RaNNCModule(model, optimizer)
raises(UsageError, "already wrapped in a RaNNCModule", lambda: pyrannc.profile(model, torch.ones(1, 8)))
wrapped(torch.ones(ROWS, 8, dtype=torch.float64)).pow(2).sum().backward()
optimizer.step()
assert isinstance(wrapped, nn.Module)
