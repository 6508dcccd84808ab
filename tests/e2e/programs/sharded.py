"""Trains under ZeRO and compares with one process: states, checkpoints, hooks, closures, scaler, undeploy.

usage: sharded.py {train|resume} FOLDER

`train` saves after two steps into FOLDER; `resume` loads there, under whatever plan and ZeRO stage, and goes on.
"""

from __future__ import annotations

import copy
import os
import sys
from typing import Any

import torch
from torch import nn

import pyrannc
from rannd.plan.stage_costs import estimate
from rannd.runtime.zero import sharded_step
from rannd.runtime.zero.tensor_piece import TensorPiece

MODE, FOLDER = sys.argv[1], sys.argv[2]
estimate.SEGMENT = 0  # bytes: each block is a segment, as in a large model
if "RANNC_OFFLOAD_OPTIMIZER" in os.environ:
    sharded_step.MOST = 1 << 19  # bytes: several buckets
RANK, WORLD = pyrannc.get_rank(), pyrannc.get_world_size()
ROWS = 12
"""Of the global batch."""


class Model(nn.Module):
    """Odd sizes, a frozen layer, a scalar, a large matrix, tied weights, and a layer of which nothing is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 401)
        self.second = nn.Linear(401, 403)
        self.frozen = nn.Linear(403, 7).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.last.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale)
        return self.again(torch.tanh(self.last(hidden))).pow(2).mean()


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Model().double()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    # an eps at which gradients that are nearly zero decide nothing
    return model, torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2, eps=1e-3)


def batch(step: int) -> torch.Tensor:
    return torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def mine(step: int) -> torch.Tensor:
    return batch(step).tensor_split(WORLD)[RANK]


def equal(a: Any, b: Any, what: str) -> None:
    if isinstance(a, TensorPiece):
        assert a.shape == b.shape, (what, a.shape, b.shape)
        a, b = a.flat, b.reshape(-1)[a.piece.start : a.piece.stop]
    assert type(a) is type(b), (what, type(a), type(b))
    if isinstance(a, torch.Tensor):
        assert a.shape == b.shape, (what, a.shape, b.shape)
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12), (what, (a - b).abs().max())
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), (what, a.keys(), b.keys())
        for key in a:
            equal(a[key], b[key], f"{what}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), what
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            equal(one, other, f"{what}.{number}")
    else:
        assert a == b, (what, a, b)


class Reference:
    """The same training in one process."""

    def __init__(self) -> None:
        self.model, self.optimizer = build()

    def step(self, number: int, clip: float = 0.0, *, update: bool = True) -> None:
        self.optimizer.zero_grad()
        self.model(batch(number)).backward()
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        if update:
            self.optimizer.step()

    def check(self, model: pyrannc.RaNNCModule, optimizer: Any, when: str) -> None:
        state = model.state_dict()
        whole = optimizer.state_dict(from_global=True)
        if RANK == 0:
            equal({**state}, {**self.model.state_dict()}, f"{when}: model")
            equal(whole, self.optimizer.state_dict(), f"{when}: optimizer")
        for name, parameter in model.named_parameters(own=True):
            equal(parameter.detach(), self.model.get_parameter(name).detach(), f"{when}: {name} on rank {RANK}")


def train_step(model: Any, optimizer: Any, number: int, clip: float = 0.0) -> None:
    optimizer.zero_grad()
    model(mine(number)).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def tell_bytes(model: Any, optimizer: Any) -> None:
    """The bytes of moments on this rank, and those of the parameters that they are of."""
    held = [p for _, p in model.named_parameters(own=True) if p.requires_grad and p.grad is not None]
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim or t.numel() > 1]
    own = sum(t.numel() for t in moments) // 2
    print(f"rank {RANK}: moments of {own} of {sum(p.numel() for p in held)} elements")


def train(model: Any, optimizer: Any, reference: Reference) -> None:
    train_step(model, optimizer, 0)
    reference.step(0)
    train_step(model, optimizer, 1, clip=0.01)
    reference.step(1, clip=0.01)
    reference.check(model, optimizer, "clipped")
    tell_bytes(model, optimizer)
    pyrannc.save_checkpoint(FOLDER, model, optimizer, step=2)

    # hooks of the script see whole parameters, before and behind a step
    seen: list[str] = []

    def look(when: str) -> Any:
        def hook(other: torch.optim.Optimizer, *_: Any) -> None:
            sizes = {tuple(p.shape) for group in other.param_groups for p in group["params"]}
            whole = {tuple(p.shape) for _, p in model.named_parameters(own=True)}
            assert sizes <= whole, (when, sizes)
            if when == "after":
                for name, p in model.named_parameters(own=True):
                    equal(p.detach(), reference.model.get_parameter(name).detach(), f"in a hook: {name}")
            seen.append(when)

        return hook

    handles = [optimizer.register_step_pre_hook(look("before")), optimizer.register_step_post_hook(look("after"))]
    reference.step(2)
    train_step(model, optimizer, 2)
    assert seen == ["before", "after"], seen
    for handle in handles:
        handle.remove()

    # a closure runs the model inside of the step
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(mine(3))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        return loss

    optimizer.step(closure)
    reference.step(3, clip=0.02)
    reference.check(model, optimizer, "closure")

    # a step that fails leaves nothing behind
    class Stop(Exception):
        pass

    def fails() -> float:
        raise Stop

    try:
        optimizer.step(fails)
    except Stop:
        pass
    else:
        raise AssertionError("the error is lost")
    reference.check(model, optimizer, "failed")
    train_step(model, optimizer, 4)
    reference.step(4)
    reference.check(model, optimizer, "after a failure")

    # unless it is said, the state is the whole one; a part loads again on purpose
    bare = optimizer.state_dict()
    if RANK == 0:
        equal(bare, reference.optimizer.state_dict(), "whole state")
    own = copy.deepcopy(optimizer.state_dict(from_global=False))
    train_step(model, optimizer, 5)
    optimizer.load_state_dict(own, from_global=False)
    whole = copy.deepcopy(reference.optimizer.state_dict())
    model.load_state_dict(reference.model.state_dict())
    reference.check(model, optimizer, "own part loaded")

    # a whole state, given to every rank
    train_step(model, optimizer, 5)
    model.load_state_dict(reference.model.state_dict())
    optimizer.load_state_dict(whole)
    reference.check(model, optimizer, "whole state loaded")
    reference.step(6)
    train_step(model, optimizer, 6)
    reference.check(model, optimizer, "after loading")

    # the whole model again, and once more divided
    model.undeploy()
    equal(optimizer.state_dict(), reference.optimizer.state_dict(), "undeployed")
    reference.step(7)
    train_step(model, optimizer, 7)
    reference.check(model, optimizer, "deployed again")


def main() -> None:
    model, optimizer = build()
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    reference = Reference()
    if MODE == "train":
        train(wrapped, optimizer, reference)
    else:
        for number in range(2):
            reference.step(number, clip=0.01 * number)
        train_step(wrapped, optimizer, 9)
        assert pyrannc.load_checkpoint(FOLDER, wrapped, optimizer).step == 2
        reference.check(wrapped, optimizer, "loaded")
        reference.step(2)
        train_step(wrapped, optimizer, 2)
        reference.check(wrapped, optimizer, "went on")
    stages = len(wrapped.deployment.stages)
    print(f"rank {RANK} is right under {stages} stages, ZeRO {wrapped.deployment.zero}")


main()
