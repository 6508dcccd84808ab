"""Several wrapped models in one script, frozen and not, and hooks of their parameters, in other plans side by side."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from yardstick import RANK, SIZE, Plain, batches, network, raises, same, same_parameters

import pyrannc
from rannd.errors import UsageError


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.5, 0.9))


def wrap(inner: nn.Module, stages: int) -> tuple[pyrannc.RaNNCModule, torch.optim.Optimizer, Plain]:
    os.environ["RANNC_PARTITION_NUM"] = str(stages)
    plain, optimizer = Plain(inner, adam), adam(list(inner.parameters()))
    return pyrannc.RaNNCModule(inner, optimizer), optimizer, plain


def freeze(model: nn.Module, how: str, trained: bool) -> None:
    if how == "each":
        for parameter in model.parameters():
            parameter.requires_grad_(trained)
    elif how == "attribute":
        for parameter in model.parameters():
            parameter.requires_grad = trained
    else:
        model.requires_grad_(trained)


class Judge(nn.Module):
    """Computes its score itself, so that its backward runs inside the call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network(seed=2, depth=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score: torch.Tensor = self.layers(x).mean()
        return score


def gan(stages: tuple[int, int], how: str, judge: Callable[[], nn.Module] = lambda: network(seed=2, depth=3)) -> None:
    """Gradients go through the discriminator into the generator."""
    g, g_optimizer, plain_g = wrap(network(seed=1, depth=3), stages[0])
    d, d_optimizer, plain_d = wrap(judge(), stages[1])
    assert plain_g.optimizer is not None
    assert plain_d.optimizer is not None
    for step in range(4):
        z, real = batches(step), batches(100 + step)
        for optimizer in (d_optimizer, plain_d.optimizer):
            optimizer.zero_grad()
        (d(g(z[RANK]).detach()).mean() - d(real[RANK]).mean()).backward()
        plain_d.gradients(
            [
                lambda m, a=a, b=b: m(plain_g.model(a).detach()).mean() - m(b).mean()
                for a, b in zip(z, real, strict=True)
            ]
        )
        same_parameters(d, plain_d.model, f"{stages} {how}: discriminator in step {step}")
        for optimizer in (d_optimizer, plain_d.optimizer):
            optimizer.step()
        for optimizer in (g_optimizer, plain_g.optimizer):
            optimizer.zero_grad()
        if how != "never":
            for each in (d, plain_d.model):
                freeze(each, how, False)
        (-d(g(z[RANK])).mean()).backward()
        plain_g.gradients([lambda m, a=a: -plain_d.model(m(a)).mean() for a in z])
        same_parameters(g, plain_g.model, f"{stages} {how}: generator in step {step}")
        same_parameters(d, plain_d.model, f"{stages} {how}: discriminator behind it in step {step}")
        if how != "never":
            for each in (d, plain_d.model):
                freeze(each, how, True)
        for optimizer in (g_optimizer, plain_g.optimizer):
            optimizer.step()
    assert [len(model.deployment.stages) for model in (g, d)] == list(stages)
    pyrannc.clear()


gan((2, 1), "each")
gan((1, 2), "attribute")
gan((2, 2), "all")
gan((2, 2), "never")
gan((1, 2), "each", Judge)
gan((2, 2), "all", Judge)
gan((2, 1), "never", Judge)


def distil() -> None:
    """A teacher that is never trained, a student with a loss outside and a head of its own on each rank."""
    os.environ["RANNC_PARTITION_NUM"] = "2"
    teacher = pyrannc.RaNNCModule(network(seed=3))
    teacher.eval()
    student, optimizer, plain = wrap(network(seed=4), 2)
    plain_teacher, head = network(seed=3), nn.Linear(8, 8).double()
    with torch.no_grad():
        head.weight.copy_(torch.eye(8))
        head.bias.zero_()
    for step in range(2):
        given = batches(step)
        with torch.no_grad():
            target = teacher(given[RANK])
        same(target, plain_teacher(given[RANK]), "teacher")
        head.zero_grad()
        optimizer.zero_grad()
        plain.model.zero_grad()
        (head(student(given[RANK])) - target).pow(2).sum().backward()
        plain.gradients([lambda m, x=x: (m(x) - plain_teacher(x).detach()).pow(2).sum() for x in given])
        same_parameters(student, plain.model, "student")
        out = plain.model(given[RANK]).detach()
        local = (2 * (out - plain_teacher(given[RANK]).detach())).sum(0).detach()
        same(head.bias.grad, local, "the head's gradient is this rank's own")
    assert sum(1 for _ in student.modules()) == 2 + sum(1 for _ in plain.model.children())
    pyrannc.clear()


distil()


class Losing(nn.Module):
    """Computes its loss, or leaves that to the script; has tied weights."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.body, self.inside = network(seed=6), inside
        self.body.append(nn.Linear(8, 8).double())
        self.body[-1].weight = self.body[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        return out.pow(2).sum() if self.inside else out


def hooks(inside: bool) -> None:
    """Each runs once for a reduction, on the reduced gradient, wherever the parameter is held."""
    inner = Losing(inside)
    seen: list[tuple[str, torch.Tensor]] = []
    names = {id(p): n for n, p in inner.named_parameters()}
    plain = Plain(inner)

    def loss(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = m(x)
        return out if inside else out.pow(2).sum()

    def note(name: str) -> object:
        return lambda gradient: seen.append((name, gradient.clone()))

    def replace(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3

    def after(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    first = [parameter.register_hook(note(name)) for name, parameter in inner.named_parameters()]
    removed = [parameter.register_hook(lambda gradient: gradient * 1000) for parameter in inner.parameters()]
    model, _, _ = wrap(inner, 2)
    for handle in removed:
        handle.remove()
    given = batches(0)
    loss(model, given[RANK]).backward()
    plain.gradients([lambda m, x=x: loss(m, x) for x in given])
    expected = dict(plain.model.named_parameters())
    own = {name for name, _ in model.named_parameters(own=True)}
    held: list[set[str]] = [set() for _ in given]
    dist.all_gather_object(held, own)  # a stage may have none
    assert set().union(*held) == set(expected)
    assert sorted(name for name, _ in seen) == sorted(own)
    for name, gradient in seen:
        same(gradient, expected[name].grad, f"hook of {name}")
    for handle in first:
        handle.remove()
    seen.clear()
    for parameter in model.parameters():  # and after the deployment
        parameter.register_hook(replace)
        parameter.register_post_accumulate_grad_hook(after)
    kept = {name: parameter.grad for name, parameter in model.named_parameters(own=True)}
    loss(model, given[RANK]).backward()
    assert not seen
    for name, parameter in model.named_parameters(own=True):
        same(parameter.grad, expected[name].grad * 2, f"hooks of {name}")  # (1 + 3) / 2
        assert parameter.grad is kept[name]  # added in place
    pyrannc.delay_grad_allreduce(True)
    model.zero_grad()
    for _ in range(2):
        loss(model, given[RANK]).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    pyrannc.delay_grad_allreduce(False)
    model.allreduce_grads()
    for name, parameter in model.named_parameters(own=True):
        same(parameter.grad, expected[name].grad * 3, f"hooks of {name}, once for two backwards")
    assert set(names.values()) >= own
    pyrannc.clear()


hooks(False)
hooks(True)


def fused() -> None:
    """Optimizers that step in the backward, parameter by parameter."""
    model, _, plain = wrap(network(seed=8), 2)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in [*model.parameters(own=True), *plain.model.parameters()]}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters(own=True):
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        given = batches(number)
        model(given[RANK]).pow(2).sum().backward()
        plain.backward(given)
        for parameter in plain.model.parameters():
            step(parameter)
        same_parameters(model, plain.model, f"fused step {number}")
    pyrannc.clear()


fused()

# What may not be wrapped beside a wrapped model, once it is distributed.
model, _, _ = wrap(network(seed=9), 2)
model(batches(0)[RANK])
shared = nn.Sequential(nn.Linear(8, 8).double())
shared[0].weight = model.get_parameter("0.weight")
raises(UsageError, "0.weight is 0.weight of a model that is already wrapped", lambda: pyrannc.RaNNCModule(shared))
assert SIZE == 2
print(f"several models are right on rank {RANK}", flush=True)
