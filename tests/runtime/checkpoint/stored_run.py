"""The training whose checkpoint lies in stored/, written by an earlier version of the code on two ranks, a stage each.

Every value of it follows from its name, so that whoever reads the checkpoint can tell what it should be. The folder
was made under ``rannc-run -np 2`` with RANNC_PARTITION_NUM=2 and RANNC_MEM_LIMIT_GB=0.0000013 by a script that calls
`save("stored")`. Do not make it again: it shows that older checkpoints load.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn

import pyrannc

WIDTH = 4


class Net(nn.Module):
    """Tied weights, a frozen parameter, a buffer, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.three.weight = self.two.weight
        self.one.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.note = ""

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.note = state["note"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.three(torch.tanh(self.two(torch.tanh(self.one(x)))))


class Nested(torch.optim.Optimizer):
    """Its state: lists, tuples and dicts of tensors, None and numbers; an entry of no parameter; a key of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.5), "betas": (0.9, 0.99), "mode": "nested"})
        self.rounds = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.rounds += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds = state_dict["rounds"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "rounds"})


def value(name: str, like: torch.Tensor) -> torch.Tensor:
    """The value of what has this name, in the shape of another tensor."""
    first = zlib.crc32(name.encode()) % 1000
    return (torch.arange(like.numel()) + first).reshape(like.shape) / 64


def state(name: str, p: torch.Tensor) -> dict[str, Any]:
    """The optimizer's state of a parameter."""
    return {
        "step": torch.tensor(float(len(name))),
        "big": value(f"{name} big", torch.empty(5, 4)),
        "history": [value(f"{name} 0", p), None, (value(f"{name} 1", p), 2.5)],
        "deep": {"a": {"b": value(f"{name} b", p)}, 3: 7},
        "half": value(f"{name} half", p).bfloat16(),
        "nothing": [],
        "none": None,
    }


class StoredRun:
    """Model and optimizer: a group of matrices, and one of vectors with a parameter that is not the model's."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.inner = Net()
        self.own = nn.Parameter(torch.zeros(3))
        named = list(self.inner.named_parameters())
        matrices = [(name, p) for name, p in named if p.ndim == 2]
        vectors = [("own", self.own), *((name, p) for name, p in named if p.ndim == 1)]
        self.optimizer = Nested([{"params": matrices}, {"params": vectors, "lr": 0.25}])
        self.model = pyrannc.RaNNCModule(self.inner, self.optimizer)

    def fill(self) -> None:
        """Give the model the values that names say. Before it is deployed."""
        with torch.no_grad():
            for name, p in self.inner.named_parameters():
                p.copy_(value(name, p))
        self.inner.note = "stored"

    def fill_state(self) -> None:
        """Give the optimizer the state that names say. Of what this rank has."""
        for group in self.optimizer.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.requires_grad:
                    self.optimizer.state[p] = state(name, p)
        self.optimizer.state["counter"] = {"n": 7}  # type: ignore[index]
        self.optimizer.rounds = 9


def save(path: str) -> None:
    """Write the checkpoint."""
    run = StoredRun()
    run.fill()
    run.model(torch.ones(2, WIDTH)).sum().backward()
    run.fill_state()
    pyrannc.save_checkpoint(path, run.model, run.optimizer, step=11, extra={"epoch": (1, None)})
