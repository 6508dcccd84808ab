"""Trains for some steps two kinds of layers, wide and narrow ones.

usage: calibrated.py STEPS
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import pyrannc
from rannd.plan import measured_step
from rannd.runtime.planning import calibration_of_job
from rannd.runtime.timeline import step_times

measured_step.BUSY, calibration_of_job.DOUBTFUL = float("inf"), 0.6  # other tests run beside
step_times.WAITING = float("inf")

NARROW, WIDE, ROWS = 256, 1024, 64


class Layer(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(NARROW, inner), nn.Linear(inner, NARROW)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(NARROW) for _ in range(8)), *(Layer(WIDE) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    for _ in range(int(sys.argv[1])):
        optimizer.zero_grad()
        wrapped(torch.randn(ROWS, NARROW)).backward()
        optimizer.step()
    if pyrannc.get_rank() == 0:
        for stage in wrapped.deployment.stages:
            estimate = stage.estimate
            print(f"STAGE {len(stage.ops)} {(estimate.forward_us + estimate.backward_us) / estimate.pieces:.1f}")
        print(f"PREDICTED {wrapped.deployment.step_us:.1f}")
        time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
    pyrannc.barrier()


if __name__ == "__main__":
    main()
