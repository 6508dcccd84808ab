"""Training with undeploy in between goes on exactly as without: momentum, Adam, groups, schedulers, uneven batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from yardstick import RANK, SIZE, Plain, batches, network, raises, same, same_parameters

import pyrannc
from rannd.errors import StepError, UsageError
from rannd.runtime.parameters.absent import is_absent

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 0.8**n]),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.2], total_steps=20),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


class Counting(nn.Linear):
    """Has a buffer on the last stage."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, object]]:
    """The first group is the first layer alone: empty on the last rank."""
    return [{"params": list(parameters[:2]), "lr": 0.05}, {"params": list(parameters[2:])}]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(groups(parameters), lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(groups(parameters), lr=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(groups(parameters), lr=0.01),
}


def same_optimizer(mine: torch.optim.Optimizer, plain: Plain, model: nn.Module) -> None:
    names = {id(p): n for n, p in model.named_parameters()}
    others = {id(p): n for n, p in plain.model.named_parameters()}
    assert plain.optimizer is not None
    for one, other in zip(mine.param_groups, plain.optimizer.param_groups, strict=True):
        assert [names[id(p)] for p in one["params"]] == [others[id(p)] for p in other["params"]]
        assert one["lr"] == other["lr"]
        for p, q in zip(one["params"], other["params"], strict=True):
            assert mine.state[p].keys() == plain.optimizer.state[q].keys()
            for key, value in plain.optimizer.state[q].items():
                same(mine.state[p][key], value, f"state {key} of {names[id(p)]}")


def train(kind: str, scheduler: str, when: Sequence[int]) -> None:
    """Six steps, the last one smaller, with undeploy after the backward or the step of some."""
    inner = network(depth=3, seed=5)
    inner.append(Counting(8, 8).double())
    identities = [id(p) for p in inner.parameters()]
    plain = Plain(inner, OPTIMIZERS[kind])
    assert plain.optimizer is not None
    optimizer = OPTIMIZERS[kind](list(inner.parameters()))
    early = SCHEDULERS[scheduler](optimizer) if scheduler == "lambda" else None
    model = pyrannc.RaNNCModule(inner, optimizer)
    mine, theirs = early or SCHEDULERS[scheduler](optimizer), SCHEDULERS[scheduler](plain.optimizer)
    for step in range(6):
        given = batches(step, rows=[3 - (step == 5)] + [3] * (SIZE - 1))
        optimizer.zero_grad()
        plain.optimizer.zero_grad()
        loss = model(given[RANK]).pow(2).sum()
        loss.backward()
        plain.backward(given)
        if step in when and step % 2:
            model.undeploy()
            same_parameters(model, plain.model, f"{kind} after backward {step}")
        optimizer.step()
        plain.optimizer.step()
        for each in (mine, theirs):
            each.step(*([1.0] if scheduler == "plateau" else []))
        if step in when and not step % 2:
            model.undeploy()
            model.undeploy()  # nothing more happens
            assert [id(p) for p in model.parameters()] == identities
            for (name, p), q in zip(inner.named_parameters(), plain.model.parameters(), strict=True):
                same(p, q, f"{kind} {name} after step {step}")
            same_optimizer(optimizer, plain, inner)
        same_parameters(model, plain.model, f"{kind} {scheduler} step {step}")
    assert len(model.deployment.stages) == 2
    assert len(optimizer.param_groups) == 2
    model.undeploy()
    assert inner[-1].calls == 6
    same_optimizer(optimizer, plain, inner)
    pyrannc.clear()


train("sgd", "lambda", ())
train("sgd", "cycle", (0, 1, 2, 3))
train("adam", "plateau", (1, 2))
train("adagrad", "plateau", (2,))

# What happens around it.
inner = network(seed=7)
before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
model = pyrannc.RaNNCModule(inner, optimizer)
model.undeploy()  # before the first call: nothing
loss = model(batches(0)[RANK]).sum()
assert any(is_absent(p) for p in inner.parameters())
model.undeploy()
assert all(torch.equal(tensor, before[name]) for name, tensor in inner.state_dict().items())
raises(StepError, "made before model.undeploy()", loss.backward)
pyrannc.delay_grad_allreduce(True)
model(batches(0)[RANK]).sum().backward()
raises(StepError, "gradients were not reduced yet", model.undeploy)
pyrannc.delay_grad_allreduce(False)
model.allreduce_grads()
optimizer.state[next(iter(model.parameters(own=True)))]["mine"] = object() if RANK == 0 else 1
raises(UsageError, "'mine'", model.undeploy)
assert any(is_absent(p) for p in inner.parameters())  # nothing has changed
optimizer.state.clear()
model.undeploy()
x = batches(1)[RANK]
same(model(x), Plain(network(seed=7)).model(x), "deployed again")
pyrannc.clear()
raises(StepError, "dropped by pyrannc.clear", lambda: model(x))
raises(StepError, "dropped by pyrannc.clear", model.undeploy)
raises(StepError, "dropped by pyrannc.clear", lambda: list(model.parameters()))
raises(UsageError, "call undeploy() before a RaNNCModule is dropped", lambda: pyrannc.RaNNCModule(inner))
print(f"undeploying is right on rank {RANK}", flush=True)
