"""What scripts do with gradients between backward and step, equal to one process under every ZeRO stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import pyrannc
from rannd.errors import UsageError
from rannd.plan.stage_costs import estimate

estimate.SEGMENT = 0  # bytes: each block is a segment, as in a large model
RANK, WORLD = pyrannc.get_rank(), pyrannc.get_world_size()
ROWS = 8
"""Of the global batch."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 301)
        self.second = nn.Linear(301, 5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.tanh(self.first(x)))).pow(2).mean()


def build() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Model().double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


plain, plain_optimizer = build()
inner, optimizer = build()
model: Any = pyrannc.RaNNCModule(inner, optimizer)


def check(when: str) -> None:
    """The same gradients, and then the same parameters."""
    for name, parameter in plain.named_parameters():
        found = model.get_param_grad(name)
        assert (found is None) == (parameter.grad is None), (when, name)
        if found is not None:
            assert torch.allclose(found, parameter.grad, rtol=1e-9, atol=1e-13), (when, name)
    plain_optimizer.step()
    optimizer.step()
    state = model.state_dict()
    if RANK == 0:
        for name, value in plain.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-9, atol=1e-12), (when, name)


def both(number: int) -> None:
    plain(batch(number)).backward()
    model(batch(number).tensor_split(WORLD)[RANK]).backward()


def own() -> list[nn.Parameter]:
    return [parameter for _, parameter in model.named_parameters(own=True)]


def main() -> None:
    both(0)
    check("first")

    both(1)  # accumulated on those of the last step
    check("accumulated")

    for reset in (optimizer.zero_grad, model.zero_grad, inner.zero_grad):
        plain_optimizer.zero_grad()
        reset(set_to_none=False)
        both(2)
        check(f"after {reset}")
    plain_optimizer.zero_grad()
    for parameter in own():
        parameter.grad = None
    both(3)
    check("set to None")

    plain_optimizer.zero_grad()
    optimizer.zero_grad()
    both(4)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert torch.allclose(model.calc_grad_norm(), norm, rtol=1e-9)
    assert torch.allclose(nn.utils.clip_grad_norm_(model.parameters(), 0.01), norm, rtol=1e-9)
    assert torch.allclose(
        model.calc_grad_norm(float("inf")), nn.utils.get_total_norm([p.grad for p in plain.parameters()], float("inf"))
    )
    check("norm")

    both(5)
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    for parameter in plain.parameters():
        parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=1e-3)
    for parameter in own():
        if model.deployment.zero < 3:
            parameter.grad.mul_(0.5).add_(parameter.detach(), alpha=1e-3)
        else:
            parameter.grad.mul_(0.5)
    if model.deployment.zero == 3:
        for parameter in plain.parameters():
            parameter.grad.add_(parameter.detach(), alpha=-1e-3)
    for parameter in (*plain.parameters(), *own()):
        parameter.grad.data = parameter.grad.data * 0.5
        assert parameter.grad.new_ones(2).sum().item() == 2
    check("by elements")

    seen: list[torch.Size] = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.shape)
        return gradient * gradient.norm()

    handles = [p.register_hook(double) for p in (plain.second.weight, inner.second.weight)]
    plain_optimizer.zero_grad()
    optimizer.zero_grad()
    both(6)
    check("hooks")
    assert set(seen) == {torch.Size((5, 301))}
    for handle in handles:
        handle.remove()

    plain_optimizer.zero_grad()
    optimizer.zero_grad()
    pyrannc.delay_grad_allreduce(True)
    both(7)
    pyrannc.delay_grad_allreduce(False)
    both(8)
    check("delayed")

    plain_optimizer.zero_grad()
    optimizer.zero_grad()
    pyrannc.delay_grad_allreduce(True)
    both(9)
    pyrannc.delay_grad_allreduce(False)
    model.allreduce_grads()
    check("reduced later")

    if all(stage.estimate.param_bytes for stage in model.deployment.stages):  # on all ranks alike
        by_own_parameters()

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain_optimizer.zero_grad()
    optimizer.zero_grad()
    scaler.scale(model(batch(10).tensor_split(WORLD)[RANK])).backward()
    infinity = torch.zeros(301, 5, dtype=torch.float64)
    infinity[0, 0] = float("inf")
    gradient = inner.first.weight.grad
    if gradient is not None and len(model.deployment.stages) == 1:  # stages do not know of what a script adds
        gradient.add_(infinity)  # in the piece of one replica
        before = model.get_param("first.weight")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0, scaler.get_scale()
        assert torch.equal(model.get_param("first.weight"), before)
    optimizer.zero_grad()

    plain_optimizer.zero_grad()
    optimizer.zero_grad()
    both(11)
    model.undeploy()
    for name, parameter in plain.named_parameters():
        there = inner.get_parameter(name).grad
        assert there is not None
        assert torch.allclose(there, parameter.grad, rtol=1e-9, atol=1e-13), name
    both(12)
    check("deployed again")
    print(f"rank {RANK} has right gradients under {len(model.deployment.stages)} stages, ZeRO {model.deployment.zero}")


def by_own_parameters() -> None:
    """What every rank does with the parameters that it holds."""
    mine = [p for _, p in model.named_parameters(own=True)]
    names = [name for name, _ in model.named_parameters(own=True)]
    found = torch.autograd.grad(model(batch(10).tensor_split(WORLD)[RANK]), mine)
    asked = torch.autograd.grad(plain(batch(10)), [plain.get_parameter(name) for name in names])
    for name, one, other in zip(names, found, asked, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-13), name

    told = ""
    try:
        own()[0].grad.sum()  # type: ignore[union-attr]
    except UsageError as exc:
        told = str(exc)
    assert ("calc_grad_norm" in told) == (model.deployment.zero >= 2), told


main()
