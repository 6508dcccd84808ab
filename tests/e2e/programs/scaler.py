"""GradScaler over two stages of which one alone overflows: both skip the same steps, as one process does.

With the argument "frozen" the other stage has nothing to train.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

import pyrannc

STEPS = 8


class Model(nn.Module):
    """The gradient of `extra`, in the last stage, is 1e10; all others are small."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.last = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        self.extra = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).square().mean() + self.extra * 1e10


torch.manual_seed(5)
plain = Model()
if "frozen" in sys.argv:
    plain.first.requires_grad_(False)
inner = copy.deepcopy(plain)


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    others = [*model.first.parameters(), *model.last.parameters()]
    return torch.optim.SGD([{"params": others}, {"params": [model.extra], "lr": 0.0}], lr=0.01, momentum=0.9)


mine, theirs = optimizer_of(inner), optimizer_of(plain)
scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**96, growth_interval=2) for _ in range(2)]
model = pyrannc.RaNNCModule(inner, mine, scaler=scalers[0])
batches = torch.randn(STEPS, pyrannc.get_world_size(), 4, 8)
skipped = 0
for batch in batches:
    mine.zero_grad()
    theirs.zero_grad()
    scalers[0].scale(model(batch[pyrannc.get_rank()])).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    overflows = sum(not gradient.isfinite().all() for gradient in grads if gradient is not None)
    assert overflows <= 1, "what overflows does so alone"
    scalers[0].step(mine)
    before = scalers[0].get_scale()
    scalers[0].update()
    skipped += scalers[0].get_scale() < before
    for each in batch:
        scalers[1].scale(plain(each)).backward()
    for parameter in plain.parameters():
        if parameter.grad is None:
            assert not parameter.requires_grad
            continue
        parameter.grad /= len(batch)  # afterwards: a stage adds up the pieces of all ranks, too
    scalers[1].step(theirs)
    scalers[1].update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert "frozen" in sys.argv or bool(overflows) == (scalers[0].get_scale() < before)
assert 0 < skipped < STEPS, "neither all nor none"
end = model.state_dict(rank0_only=False)
for name, value in plain.state_dict().items():
    torch.testing.assert_close(end[name], value, rtol=1e-4, atol=1e-6)
print(f"rank {pyrannc.get_rank()} skipped {skipped} of {STEPS}", flush=True)
