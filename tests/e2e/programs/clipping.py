"""Clipping in two stages: by name, by parts, by torch's functions, imported before and after the wrap; or alone."""

from __future__ import annotations

import itertools
import logging
import math
import re
import sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_before
from yardstick import RANK, Plain, batches, network, raises, same, same_parameters

import pyrannc
from rannd.errors import StepError, UsageError

logging.getLogger("rannd").propagate = True


def wrap(seed: int = 0) -> tuple[pyrannc.RaNNCModule, Plain]:
    inner = network(seed=seed)
    inner.append(nn.Linear(8, 8).double())
    inner[-1].weight = inner[0].weight  # held by both stages, counted once
    plain = Plain(inner, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    model = pyrannc.RaNNCModule(inner, optimizer)
    model.optimizer = optimizer
    return model, plain


def backward(model: pyrannc.RaNNCModule, plain: Plain, step: int) -> None:
    for each in (model, plain.model):
        each.zero_grad()
    given = batches(step)
    model(given[RANK]).pow(2).sum().backward()
    plain.backward(given)


model, plain = wrap()
backward(model, plain, 0)
assert len(model.deployment.stages) == 2
own = {name for name, _ in model.named_parameters(own=True)}
assert own != {name for name, _ in plain.model.named_parameters()}

ways = {
    "method": lambda m, **kw: m.clip_grad_norm(0.5, **kw) if m is model else imported_before(m.parameters(), 0.5, **kw),
    "torch": lambda m, **kw: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5, **kw),
    "module": lambda m, **kw: torch.nn.utils.clip_grad.clip_grad_norm_(list(m.parameters()), 0.5, **kw),
    "imported": lambda m, **kw: imported_before(m.parameters(), 0.5, **kw),
}
for number, (name, way) in enumerate(ways.items()):
    for kind in (2.0, 1, 3.5, math.inf, -math.inf, 0):
        for foreach in (None, False, True):
            backward(model, plain, number)
            same(way(model, norm_type=kind, foreach=foreach), way(plain.model, norm_type=kind, foreach=foreach), name)
            same_parameters(model, plain.model, f"{name} {kind}")

# Parts of the model, of which a rank may hold nothing.
for part in ("0.", "2.", "6.", "8."):
    backward(model, plain, 5)
    mine = [p for n, p in model.named_parameters() if n.startswith(part)]
    other = [p for n, p in plain.model.named_parameters() if n.startswith(part)]
    same(torch.nn.utils.clip_grad_norm_(mine, 0.1), torch.nn.utils.clip_grad_norm_(other, 0.1), part)
    same_parameters(model, plain.model, part)
backward(model, plain, 6)
same(
    torch.nn.utils.clip_grad_norm_(model.get_submodule("2").parameters(), 0.1),
    torch.nn.utils.clip_grad_norm_(plain.model[2].parameters(), 0.1),
    "a submodule",
)
same_parameters(model, plain.model, "a submodule")
same(imported_before(iter(()), 1.0), torch.zeros(()), "nothing")

# The two halves of clip_grad_norm_, and clipping by value.
backward(model, plain, 7)
totals = []
for each in (model, plain.model):
    total = torch.nn.utils.get_total_norm([p.grad for p in each.parameters() if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(each.parameters(), 0.3, total)
    torch.nn.utils.clip_grad_value_(each.parameters(), 0.01)
    totals.append(total)
same(*totals, "get_total_norm")
same_parameters(model, plain.model, "halves")

# Other parameters are clipped as ever, on one rank alone, too; beside the model's where they are equal on all ranks.
head = nn.Linear(8, 1).double()
head.weight.grad = torch.ones(1, 8, dtype=torch.float64)
if RANK == 0:
    same(torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0), torch.tensor(8.0).double().sqrt(), "a head")
head.weight.grad = torch.ones(1, 8, dtype=torch.float64)
backward(model, plain, 8)
both = itertools.chain(plain.model.parameters(), head.parameters())
expected = torch.nn.utils.get_total_norm([p.grad for p in both if p.grad is not None])
same(torch.nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 1e9), expected, "model and head")
head.weight.grad.add_(RANK)
raises(
    UsageError,
    "gradients differ between ranks",
    lambda: torch.nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 1.0),
)
raises(
    UsageError,
    "clip the two separately",
    lambda: torch.nn.utils.clip_grad_norm_([*list(model.parameters(own=True))[:1], *head.parameters()], 1.0),
)
pyrannc.barrier()

# What is not finite, on one stage, is told on all.
backward(model, plain, 9)
if RANK == 0:
    next(iter(model.parameters(own=True))).grad.view(-1)[0] = math.nan
raises(RuntimeError, "is non-finite", lambda: model.clip_grad_norm(1.0, error_if_nonfinite=True))
assert model.clip_grad_norm(1.0).isnan()
assert all(p.grad.isnan().all() for p in model.parameters(own=True))

# Gradients that wait cannot be clipped.
model.zero_grad()
pyrannc.delay_grad_allreduce(True)
model(batches(10)[RANK]).sum().backward()
raises(StepError, "gradients were not reduced yet", lambda: model.clip_grad_norm(1.0))
raises(StepError, "gradients were not reduced yet", lambda: model.get_param_grad("0.weight"))
raises(StepError, "gradients were not reduced yet", lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0))
model.zero_grad()  # drops them
pyrannc.delay_grad_allreduce(False)
model.allreduce_grads()
assert all(p.grad is None for p in model.parameters())
raises(UsageError, "no parameter 'nothing'", lambda: model.get_param_grad("nothing"))
raises(UsageError, "no parameter 'nothing'", lambda: model.get_param("nothing"))

# A stage that is clipped alone is found out.
records: list[str] = []


class Recorder(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        records.append(record.getMessage())


logging.getLogger("rannd").addHandler(Recorder())


def train(clip: object) -> int:
    records.clear()
    pyrannc.clear()
    model, _ = wrap(seed=3)
    for step in range(6):
        model.zero_grad()
        model(batches(step)[RANK]).pow(2).sum().backward()
        clip(model)
        if RANK == 0 or step != 2:  # a rank that leaves a step out breaks nothing
            model.optimizer.step()
    return sum("gradients were scaled by different factors" in text for text in records)


def alone(model: pyrannc.RaNNCModule) -> None:
    gradients = [p.grad for p in model.parameters(own=True)]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(0.01 / norm)


assert train(alone) == (RANK == 0)
assert any("(rank 0) by " in text and "clip with model.clip_grad_norm" in text for text in records) == (RANK == 0)
assert not any("MERGE_" in text for text in records)
assert train(lambda model: model.clip_grad_norm(0.01)) == 0
assert train(lambda model: imported_before(model.parameters(), 0.01)) == 0
assert train(lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)) == 0
assert train(lambda model: None) == 0


# A norm for the log, over the gradients that this rank has, is told once; one that torch's function computes is right.
def logged(model: pyrannc.RaNNCModule) -> None:
    sum(p.grad.norm() ** 2 for p in model.parameters() if p.grad is not None)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def told(way: object) -> list[str]:
    train(way)
    return [text for text in records if "reads the gradient of" in text]


found = told(logged)
assert len(found) == (RANK == 0)
assert all(re.match(r"clipping.py:\d+ reads the gradient of \S+ on rank 1 \(stage 1\): it is None", t) for t in found)
assert told(lambda model: model.calc_grad_norm()) == []
assert told(lambda model: sum(p.grad.norm() for p in model.parameters(own=True))) == []
assert told(lambda m: torch.nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None])) == []

pyrannc.clear()
assert torch.nn.utils.clip_grad_norm_ is imported_before
print(f"clipping is right on rank {RANK}", file=sys.stdout, flush=True)
