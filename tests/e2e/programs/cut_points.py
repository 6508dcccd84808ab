"""Stages end at CutPoints, however uneven, and training is what it is without them; dropout is switched on and off."""

from __future__ import annotations

import os

import torch
from torch import nn
from yardstick import RANK, Plain, batches, network, raises, same, train_alike

import pyrannc
from rannd.errors import PlanError


def marked() -> nn.Sequential:
    """One layer before the CutPoint, behind which a ReLU writes in place; five layers after it."""
    inner = network(depth=6)
    return nn.Sequential(inner[0], pyrannc.CutPoint(), nn.ReLU(inplace=True), *inner[2:])


plain = Plain(marked(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
inner = marked()
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
os.environ["RANNC_PARTITION_NUM"] = "2"
model = pyrannc.RaNNCModule(inner, optimizer)
train_alike(model, optimizer, plain, rows=[4, 3])
names = {name for name, _ in model.named_parameters(own=True)}
first = {"0.weight", "0.bias"}
assert names == (first if RANK == 0 else {name for name, _ in plain.model.named_parameters()} - first), names
model.eval()
with torch.no_grad():
    same(model(batches(9)[RANK]), plain.model(batches(9)[RANK]), "evaluation")

os.environ["RANNC_PARTITION_NUM"] = "2"
uncut = nn.Sequential(network(depth=2), pyrannc.CutPoint())
raises(PlanError, "CutPoints only, which divide it into 1 part", lambda: pyrannc.RaNNCModule(uncut)(batches(0)[RANK]))
pyrannc.clear()


class Dropping(nn.Module):
    """Dropout as a module, as a function, and in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.drop(self.first(x)), 0.5, self.training)
        q = x[:, None, None].expand(-1, 1, 6, -1)
        p = 0.5 if self.training else 0.0
        return self.last(nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=p)[:, 0, 0])


torch.manual_seed(0)
inner = Dropping().double()
plain_eval = Plain(inner).model.eval()
model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
x = batches(3)[RANK]
for mode in (True, False):
    model.train(mode)
    model.enable_dropout(False)
    out = model(x)
    same(out, plain_eval(x), f"dropout off, training {mode}")
    model.enable_dropout(True)
    assert not torch.equal(model(x), model(x)), f"dropout on, training {mode}"
    model.enable_dropout(None)
    assert torch.equal(model(x), model(x)) == (not mode), f"dropout as in mode, training {mode}"
pyrannc.clear()
print(f"cut points are right on rank {RANK}", flush=True)
