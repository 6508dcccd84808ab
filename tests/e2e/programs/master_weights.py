"""Trains a bfloat16 model with master weights, and compares with a loop in one process that keeps them by hand.

usage: master_weights.py {train|resume|plain|bare|scaled} FOLDER

`train` saves after three steps into FOLDER, `resume` loads there under whatever plan. `plain` saves without master
weights, `bare` loads that. With one stage and at most two ranks nothing may differ by a bit. `scaled` has a float16
model and a GradScaler.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn

import pyrannc

MODE, FOLDER = sys.argv[1], sys.argv[2]
RANK, WORLD = pyrannc.get_rank(), pyrannc.get_world_size()
HALF = torch.float16 if MODE == "scaled" else torch.bfloat16
ROWS = 12
"""Of the global batch."""
NEAR = 0.02
"""Difference of two tensors relative to their norm: where sums have another order, a bfloat16 weight is rounded
otherwise now and then."""


def alike(found: torch.Tensor, value: torch.Tensor, *, exact: bool) -> bool:
    if exact:
        return torch.equal(found, value)
    return bool((found.double() - value.double()).norm() <= NEAR * value.double().norm())


class Model(nn.Module):
    """Odd sizes, a float32 layer, a scalar, tied weights, and a layer of which nothing is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 401, dtype=HALF)
        self.second = nn.Linear(401, 403, dtype=HALF)
        self.norm = nn.LayerNorm(403)
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=HALF))
        self.third = nn.Linear(403, 7, dtype=HALF)
        self.last = nn.Linear(7, 7, bias=False, dtype=HALF)
        self.again = nn.Linear(7, 7, bias=False, dtype=HALF)
        self.again.weight = self.last.weight
        self.unused = nn.Linear(3, 3, dtype=HALF)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.second(torch.tanh(self.first(x)))).float()).to(HALF) * self.scale
        return self.again(torch.tanh(self.last(self.third(hidden)))).float().pow(2).mean()


def build() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Model()
    return model, adam(list(model.parameters()))


def adam(parameters: list[Any]) -> torch.optim.Optimizer:
    decayed = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim < 2]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-3, eps=1e-4)


def parts(step: int) -> list[torch.Tensor]:
    """Each rank's mini-batch."""
    return list(torch.randn(ROWS, 7, generator=torch.Generator().manual_seed(step)).to(HALF).tensor_split(WORLD))


class ByHand:
    """The same training in one process: gradients of each rank's rows are added in float32."""

    def __init__(self) -> None:
        self.model, _ = build()
        for parameter in self.model.parameters():
            parameter.grad_dtype = torch.float32  # what tied weights get of their two uses is added in it
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.optimizer = adam(self.masters)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    def backward(self, number: int) -> None:
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for rows in parts(number):
            self.model.zero_grad()
            (self.model(rows) * (len(rows) / ROWS)).backward()
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                if parameter.grad is not None:
                    sums[master] = sums[master] + parameter.grad if master in sums else parameter.grad
        for master, gradient in sums.items():
            master.grad = gradient if master.grad is None else master.grad + gradient

    def step(self, clip: float = 0.0) -> None:
        if clip:
            nn.utils.clip_grad_norm_(self.masters, clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.write_back()

    def write_back(self) -> None:
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)

    def state(self) -> dict[str, Any]:
        """That of the optimizer, with the masters."""
        state = self.optimizer.state_dict()
        order = [each for group in self.optimizer.param_groups for each in group["params"]]
        model = {id(master): p for master, p in zip(self.masters, self.model.parameters(), strict=True)}
        for number, master in enumerate(order):
            if number in state["state"] and model[id(master)].dtype == HALF:
                state["state"][number]["master_param"] = master.detach().clone()
        return state

    def check(self, model: Any, optimizer: Any, when: str) -> None:
        # With ZeRO 2 and 3 the norm that clips is that of pieces.
        exact = WORLD <= 2 and len(model.deployment.stages) == 1 and MODE != "resume" and model.deployment.zero < 2
        whole = optimizer.state_dict(from_global=True)
        for name, mine in self.model.named_parameters():
            found = model.get_param(name)
            assert found.dtype == mine.dtype
            assert alike(found, mine, exact=exact), (when, name)
        if RANK:
            return
        expected = self.state()
        assert whole["state"].keys() == expected["state"].keys(), when
        for number, state in expected["state"].items():
            assert whole["state"][number].keys() == state.keys(), (when, number, whole["state"][number].keys())
            for key, value in state.items():
                found = whole["state"][number][key]
                assert (found.dtype, found.shape) == (value.dtype, value.shape), (when, number, key, found.dtype)
                assert alike(found, value, exact=exact), (when, number, key, (found - value).abs().max())


def train(model: Any, optimizer: Any, reference: ByHand) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

    def step(number: int, clip: float = 0.0, *, by_hand: bool = True) -> None:
        optimizer.zero_grad()
        model(parts(number)[RANK]).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if by_hand:
            scheduler.step()
            reference.backward(number)
            reference.step(clip)

    step(0)
    reference.check(model, optimizer, "first step")
    assert all(p.grad.dtype == torch.float32 for p in model.parameters(own=True) if p.grad is not None)
    step(1, clip=0.01)
    step(2)
    reference.check(model, optimizer, "clipped")
    pyrannc.save_checkpoint(FOLDER, model, optimizer, step=3)

    # gradients of two backwards add up
    optimizer.zero_grad()
    for number in (3, 4):
        model(parts(number)[RANK]).backward()
        reference.backward(number)
    optimizer.step()
    scheduler.step()
    reference.step()
    reference.check(model, optimizer, "accumulated")

    # a closure runs the model inside of the step
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(parts(5)[RANK])
        loss.backward()
        return loss

    optimizer.step(closure)
    scheduler.step()
    reference.backward(5)
    reference.step()
    reference.check(model, optimizer, "closure")

    # the script changes a parameter: its master follows, where it has changed
    if model.deployment.zero < 3:  # elsewhere a rank has a piece of it
        with torch.no_grad():
            for name, parameter in model.named_parameters(own=True):
                if name == "last.weight":
                    parameter.clamp_(-0.05, 0.05)
            for master, parameter in zip(reference.masters, reference.model.parameters(), strict=True):
                if parameter is reference.model.last.weight:
                    parameter.clamp_(-0.05, 0.05)
                    master.copy_(torch.where(master.to(HALF) == parameter, master, parameter))
    step(6)
    reference.check(model, optimizer, "changed by the script")

    # states are loaded as they were
    state, values = copy.deepcopy(reference.state()), copy.deepcopy(reference.model.state_dict())
    own = copy.deepcopy(optimizer.state_dict(from_global=False))
    step(7, by_hand=False)
    model.load_state_dict(values)
    optimizer.load_state_dict(own, from_global=False)
    reference.check(model, optimizer, "own part loaded")
    step(7, by_hand=False)
    model.load_state_dict(values)
    optimizer.load_state_dict(state, from_global=True)
    reference.check(model, optimizer, "whole state loaded")
    step(8)
    reference.check(model, optimizer, "after loading")

    # undeployed, a step on each rank alone, and deployed again
    model.undeploy()
    if WORLD == 1:
        optimizer.zero_grad()
        model.module.forward(parts(9)[0]).backward()
        optimizer.step()
        scheduler.step()
        reference.backward(9)
        reference.step()
        for name, parameter in model.module.named_parameters():
            assert torch.equal(parameter, reference.model.get_parameter(name)), name
    step(10)
    reference.check(model, optimizer, "deployed again")
    for number in range(11, 24):
        step(number)
    reference.check(model, optimizer, "at the end")


def resume(model: Any, optimizer: Any, reference: ByHand) -> None:
    for number in range(3):
        reference.backward(number)
        reference.step(clip=0.01 * (number == 1))
    model(parts(9)[RANK]).backward()
    optimizer.step()
    assert pyrannc.load_checkpoint(FOLDER, model, optimizer).step == 3
    reference.check(model, optimizer, "loaded")
    for state in optimizer.state.values():  # as they were, not rounded
        for key in ("exp_avg", "master_param") if "master_param" in state and state["exp_avg"].numel() > 7 else ():
            assert not torch.equal(state[key], state[key].to(HALF).float()), key
    optimizer.zero_grad()
    model(parts(3)[RANK]).backward()
    optimizer.step()
    reference.backward(3)
    reference.step()
    reference.check(model, optimizer, "went on")


def bare(model: Any, optimizer: Any) -> None:
    """A checkpoint of another job, without master weights: they begin with the parameters."""
    model(parts(0)[RANK]).backward()
    pyrannc.load_checkpoint(FOLDER, model, optimizer)
    before = {name: p.detach().clone() for name, p in model.named_parameters(own=True)}
    assert not any("master_param" in state for state in optimizer.state.values())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for name, parameter in model.named_parameters(own=True):
        assert torch.equal(parameter, before[name]), name
        if parameter.grad is not None and parameter.dtype == HALF and model.deployment.zero == 0:
            assert torch.equal(optimizer.state[parameter]["master_param"], parameter.float())
            assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32


def scaled(model: Any, optimizer: Any, reference: ByHand, scaler: torch.amp.GradScaler) -> None:
    """A float16 model whose loss is scaled; the second step overflows in one rank's gradients and is skipped on all."""
    for number in range(4):
        optimizer.zero_grad()
        loss = model(parts(number)[RANK])
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if number != 1:
            reference.backward(number)
            nn.utils.clip_grad_norm_(reference.masters, 1.0)
            reference.optimizer.step()
            reference.write_back()
            reference.optimizer.zero_grad()
    assert scaler.get_scale() == 512.0, scaler.get_scale()
    for name, parameter in reference.model.named_parameters():
        assert alike(model.get_param(name), parameter, exact=False), name


def main() -> None:
    model, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    wrapped = pyrannc.RaNNCModule(model, optimizer, use_amp_master_params=MODE != "plain", scaler=scaler)
    if MODE == "train":
        train(wrapped, optimizer, ByHand())
    elif MODE == "resume":
        resume(wrapped, optimizer, ByHand())
    elif MODE == "scaled":
        scaled(wrapped, optimizer, ByHand(), scaler)
    elif MODE == "plain":
        wrapped(parts(0)[RANK]).backward()
        optimizer.step()
        pyrannc.save_checkpoint(FOLDER, wrapped, optimizer)
    else:
        bare(wrapped, optimizer)
    stages = len(wrapped.deployment.stages)
    print(f"rank {RANK} is right under {stages} stages, ZeRO {wrapped.deployment.zero}")


main()
