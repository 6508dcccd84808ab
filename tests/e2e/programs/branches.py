"""Two ranks call a model that branches on what is in its mini-batch: alike, differently, and one without rows."""

from __future__ import annotations

import torch
from torch import nn

import pyrannc
from rannd.errors import StepError


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.some, self.none = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.some(x) if (labels < 0).any() else self.none(x)


torch.manual_seed(1)
plain = Branching()
model = Branching()
model.load_state_dict(plain.state_dict())
expected = {-1: plain.some, 0: plain.none}
wrapped = pyrannc.RaNNCModule(model, None)
rank = pyrannc.get_rank()


def differently() -> None:
    """Rank 1 has a label that rank 0 has not."""
    try:
        wrapped(torch.randn(2, 4), torch.tensor([1, -rank]))
    except StepError as exc:
        print(f"rank {rank}: {exc}")


differently()
for rows, least in (([2, 3], 0), ([0, 3], -1), ([3, 0], 0), ([0, 2], 0), ([2, 0], -1), ([1, 1], -1)):
    x, labels = torch.randn(rows[rank], 4), torch.zeros(rows[rank], dtype=torch.int64)
    labels[-1:] = least
    torch.testing.assert_close(wrapped(x, labels), expected[least](x))
print(f"rank {rank} agrees")

differently()
