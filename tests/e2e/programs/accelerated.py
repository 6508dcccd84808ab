"""A training loop of Hugging Face's Accelerate around a RaNNCModule, on several ranks, compared with one process."""

from __future__ import annotations

import accelerate
import torch
from torch.utils.data import DataLoader, TensorDataset
from yardstick import RANK, SIZE, Plain, network, raises, same, same_parameters

import pyrannc
from rannd.errors import UsageError

ROWS, STEPS = 4, 4

net = network()
plain = Plain(net, lambda given: torch.optim.Adam(given, lr=0.01))
assert plain.optimizer is not None
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
model = pyrannc.RaNNCModule(net, optimizer)
data = torch.randn(STEPS * SIZE * ROWS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
assert (accelerator.process_index, accelerator.num_processes) == (RANK, SIZE)
loader = DataLoader(TensorDataset(data), batch_size=ROWS)
prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert prepared is model

for step, (mine,) in enumerate(loader):
    given = data[step * SIZE * ROWS : (step + 1) * SIZE * ROWS].split(ROWS)
    assert torch.equal(mine, given[RANK])
    with accelerator.accumulate(prepared):
        accelerator.backward(prepared(mine).pow(2).sum())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    plain.gradients([lambda net, x=x: net(x).pow(2).sum() / 2 for x in given])
    if step % 2:
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        same_parameters(model, plain.model, f"step {step}")

weight = accelerator.get_state_dict(prepared)["0.weight"]
if RANK == 0:
    same(weight, plain.model.state_dict()["0.weight"], "the state on rank 0")
else:
    raises(UsageError, "another rank has", weight.sum)
print(f"Accelerate is right on rank {RANK}", flush=True)
