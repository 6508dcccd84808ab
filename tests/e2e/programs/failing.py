"""failing.py WHAT RANK [catch] [join]: trains, and in step 3 the thing WHAT goes wrong on rank RANK.

`catch`: every rank prints its errors, and goes on; `join`: the script makes the process group itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pyrannc

STEP = 3


class Trap(torch.autograd.Function):
    """Fails where its input says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.sprung = float(x.detach().max())
        if 1e6 < ctx.sprung < 1e9:
            raise ValueError("the trap is sprung")
        if 1e9 < ctx.sprung < 1e12:
            torch.empty(1 << 46, device=x.device)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if ctx.sprung > 1e12:
            raise ArithmeticError("the trap is sprung in backward")
        return gradient


class Trapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Trap.apply(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.trapped = Trapped()
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.last(torch.relu(self.trapped(torch.tanh(self.first(x)) + shift)))


SHIFTS = {"model": 1e8, "memory": 1e11, "backward": 1e14}


def go_wrong(what: str) -> None:
    """What goes wrong in the script itself."""
    if what == "script":
        raise KeyError("the script is wrong")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "sleep":
        time.sleep(10_000)


def fail_in_hook(gradient: Tensor) -> Tensor:
    raise LookupError("the hook is wrong")


def main() -> None:
    what, which = sys.argv[1], int(sys.argv[2])
    if "join" in sys.argv:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    model = pyrannc.RaNNCModule(net, optimizer)
    rank = pyrannc.get_rank()
    print(f"pid {os.getpid()}", flush=True)
    for step in range(6):
        wrong = step == STEP and rank == which
        try:
            if wrong and what == "leave":
                break
            if wrong:
                go_wrong(what)
            if wrong and what == "hook":
                next(iter(model.parameters(own=True))).register_hook(fail_in_hook)
            shift = torch.full((4, 16), SHIFTS.get(what, 0.0) if wrong else 0.0)
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8), shift).square().sum()
            if wrong and what == "late":
                go_wrong("sleep")
            loss.backward()
            optimizer.step()
        except Exception as exc:
            if "catch" not in sys.argv:
                raise
            notes = " / ".join(getattr(exc, "__notes__", []))
            print(f"rank {rank} step {step} caught {type(exc).__name__}: {exc} / {notes}", flush=True)
        finally:
            if step >= STEP:
                print(f"rank {rank} step {step} finally", flush=True)
        if what == "interrupt" and step == STEP:
            print("training", flush=True)
            time.sleep(0 if rank else 10_000)


if __name__ == "__main__":
    main()
