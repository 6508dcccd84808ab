"""A training loop of Hugging Face's Accelerate around a RaNNCModule, on several ranks, compared with one process."""

from __future__ import annotations

import copy
import sys

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

# Accelerate's own checkpoints have no state of other ranks; rannd's take what it has prepared.
folder = sys.argv[1]
if len(model.deployment.stages) == 1:
    accelerator.save_state(f"{folder}/state of {RANK}")
    accelerator.prepare(model, optimizer.optimizer)
else:
    raises(UsageError, "pyrannc.save_checkpoint(folder, model, optimizer)", lambda: accelerator.save_state(folder))
    raises(UsageError, "optimizer.optimizer.state_dict(from_global=True)", optimizer.state_dict)
    raises(
        UsageError,
        "Call accelerator.prepare before the model's first call, or after model.undeploy()",
        lambda: accelerator.prepare(model, optimizer.optimizer),
    )
pyrannc.save_checkpoint(f"{folder}/checkpoint", model, optimizer, step=STEPS)
kept = copy.deepcopy((plain.model.state_dict(), plain.optimizer.state_dict()))
for again in (False, True):
    if again:
        pyrannc.load_checkpoint(f"{folder}/checkpoint", model, optimizer)
        plain.model.load_state_dict(kept[0])
        plain.optimizer.load_state_dict(kept[1])
    prepared(data[:ROWS]).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    plain.gradients([lambda net: net(data[:ROWS]).pow(2).sum()] * SIZE)
    plain.optimizer.step()
    plain.optimizer.zero_grad()
    same_parameters(model, plain.model, "after a checkpoint")
model.undeploy()
assert accelerator.prepare(model, optimizer.optimizer)[0] is model
print(f"Accelerate is right on rank {RANK}", flush=True)
