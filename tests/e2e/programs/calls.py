"""Ways of calling a wrapped model, each compared with one process; run on several ranks and stages.

Every rank has the whole reference, and compares what it holds. Prints ``calls: all equal`` on each rank.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from rannd.errors import StepError

torch.set_default_dtype(torch.float64)
RANK, WORLD = pyrannc.get_rank(), pyrannc.get_world_size()
STAGES = int(os.environ.get("RANNC_PARTITION_NUM", "1"))
WIDTH, LARGE = 6, 20_000


class Net(nn.Module):
    """A loss with outputs beside it: a small and a large one, a number, one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(3, LARGE)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Any]:
        small = self.second(torch.tanh(self.first(x)))
        large = self.wide(small)
        loss = nn.functional.cross_entropy(small, target, ignore_index=2) + large.square().mean()
        return {"loss": loss, "small": small, "large": large, "hits": (small.argmax(1) == target).sum()}


class Outside(nn.Module):
    """No loss; rows depend on each other in training."""

    def __init__(self, coupled: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between = nn.BatchNorm1d(WIDTH) if coupled else nn.Identity()
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.between(self.first(x))))


def batch(rank: int, rows: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(rows, WIDTH, generator=generator).requires_grad_()
    return x, torch.randint(0, 3, (rows,), generator=generator)


def pair(build: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """(reference, wrapped), with equal parameters."""
    torch.manual_seed(5)
    model = build()
    reference = copy.deepcopy(model)
    return reference, pyrannc.RaNNCModule(model, **options)


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    difference = (found - wanted).abs().max() if wanted.numel() else torch.zeros(())
    assert difference <= 1e-9 * (1 + wanted.abs().max()), (what, found, wanted)


def same_gradients(wrapped: nn.Module, reference: nn.Module) -> None:
    wanted = dict(reference.named_parameters())
    for name, parameter in wrapped.named_parameters(own=True):
        assert (parameter.grad is None) == (wanted[name].grad is None), name
        if parameter.grad is not None:
            same(parameter.grad, wanted[name].grad, name)


def all_ranks(reference: nn.Module, seed: int = 0, factor: Callable[[int], float] = lambda rank: 1.0) -> None:
    """Add the mean over ranks of the gradients of their losses to the reference."""
    inputs = [batch(rank, seed=seed) for rank in range(WORLD)]
    counts = [int((target != 2).sum()) for _, target in inputs]
    assert all(counts)
    for rank, each in enumerate(inputs):
        (reference(*each)["loss"] * factor(rank) / WORLD).backward()


def refused(error: type[Exception], words: str, action: Callable[[], Any]) -> None:
    with pytest.raises(error, match=re.escape(words)):
        action()


def outputs_beside_a_loss() -> None:
    for outputs in ("auto", "all"):
        reference, wrapped = pair(Net, outputs=outputs)
        x, target = batch(RANK)
        found, wanted = wrapped(x, target), reference(x.detach(), target)
        same(found["small"], wanted["small"], "small output")
        assert int(found["hits"]) == int(wanted["hits"])
        assert found["large"].shape == wanted["large"].shape
        if outputs == "all" or STAGES == 1:
            same(found["large"], wanted["large"], "large output")
        else:
            refused(StepError, 'outputs="all"', lambda found=found: found["large"] + 1)
            refused(StepError, 'outputs="all"', lambda found=found: print(float(found["large"].sum())))
        refused(StepError, "interleave_loss=false", lambda found=found: found["small"].sum().backward())
    wrapped.eval()
    with torch.no_grad():
        same(wrapped(x, target)["large"], wanted["large"], "large output in evaluation")


def several_backwards() -> None:
    reference, wrapped = pair(Net)
    all_ranks(reference)
    all_ranks(reference)
    x, target = batch(RANK)
    loss = wrapped(x, target)["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    same_gradients(wrapped, reference)
    assert x.grad is not None
    refused(StepError, "second time", loss.backward)
    pyrannc.keep_graph(True)
    wrapped.zero_grad()
    loss = wrapped(x, target)["loss"]
    (loss / 2).backward()
    (loss * 1.5).backward()
    pyrannc.keep_graph(False)
    same_gradients(wrapped, reference)
    loss = wrapped(x, target)["loss"]
    refused(StepError, "create_graph", lambda: loss.backward(create_graph=True))
    outside, wrapped = pair(lambda: Outside(False))
    x = batch(RANK)[0]
    for rank in range(WORLD):
        (outside(batch(rank)[0]).square().sum() * 3 / WORLD).backward()
    out = wrapped(x).square().sum()
    out.backward(retain_graph=True)
    (2 * out).backward()
    same_gradients(wrapped, outside)


def several_forwards() -> None:
    reference, wrapped = pair(Net)
    all_ranks(reference, seed=1)
    all_ranks(reference, seed=2, factor=lambda rank: 3.0)
    one, two = (wrapped(*batch(RANK, seed=seed))["loss"] for seed in (1, 2))
    assert all(parameter.grad is None for parameter in wrapped.parameters(own=True))
    (one + 3 * two).backward()
    same_gradients(wrapped, reference)
    wrapped.zero_grad()
    one, two, unused = (wrapped(*batch(RANK, seed=seed))["loss"] for seed in (1, 2, 3))
    (3 * two).backward()
    one.backward()
    del unused
    same_gradients(wrapped, reference)


def switching_between_forward_and_backward() -> None:
    reference, wrapped = pair(Net)
    all_ranks(reference, seed=1)
    all_ranks(reference, seed=2)
    one = wrapped(*batch(RANK, seed=1))["loss"]  # reduced already
    pyrannc.delay_grad_allreduce(True)
    one.backward()
    two = wrapped(*batch(RANK, seed=2))["loss"]
    pyrannc.delay_grad_allreduce(False)
    two.backward()
    same_gradients(wrapped, reference)
    wrapped.zero_grad()
    pyrannc.delay_grad_allreduce(True)
    one = wrapped(*batch(RANK, seed=1))["loss"]
    two = wrapped(*batch(RANK, seed=2))["loss"]
    pyrannc.delay_grad_allreduce(False)
    two.backward()
    one.backward()
    same_gradients(wrapped, reference)


class Writing(nn.Module):
    """Writes into its arguments, of which one carries no samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        x.mul_(0.5)
        x[:, 0] += 1
        return self.second(torch.tanh(self.first(x) * scale.add_(1)))


def tensors_that_are_written_into() -> None:
    """By the model, of which the script sees nothing, and by the script."""
    reference, wrapped = pair(Writing)
    for _ in range(2):
        x, scale = batch(RANK)[0].detach(), torch.ones(WIDTH)
        found = wrapped(x, scale)
        same(x, batch(RANK)[0], "input after the call")
        same(scale, torch.ones(WIDTH), "input without samples after the call")
        same(found, reference(x.clone(), scale.clone()), "output")
        found /= 2
        found.square().sum().backward()
        for rank in range(WORLD):
            other = reference(batch(rank)[0].detach(), torch.ones(WIDTH)) / 2
            (other.square().sum() / WORLD).backward()
        same_gradients(wrapped, reference)


def gradients_that_are_asked_for() -> None:
    """Adversarial examples, ``backward(inputs=...)``, ``torch.autograd.grad``; with the loss inside and outside."""

    def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
        found = model(x, target) if isinstance(getattr(model, "_inner", model), Net) else model(x)
        return found["loss"] if isinstance(found, dict) else nn.functional.cross_entropy(found, target)

    def asked(named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
        return [parameter for name, parameter in named.items() if name.endswith("weight")] or [x]

    inputs = [batch(rank) for rank in range(WORLD)]
    x, target = batch(RANK)
    for build in (Net, lambda: Outside(False)):
        reference, wrapped = pair(build)
        loss_of(wrapped, x, target)
        kept = dict(wrapped.named_parameters(own=True))
        accumulated: list[str] = []
        for name, parameter in kept.items():
            parameter.register_post_accumulate_grad_hook(lambda p, n=name, done=accumulated: done.append(n))
        # An adversarial example leaves nothing in the parameters.
        (found,) = torch.autograd.grad(loss_of(wrapped, x, target), x)
        (wanted,) = torch.autograd.grad(loss_of(reference, x, target), x)
        same(found, wanted, "gradient of an input")
        assert all(p.grad is None for p in kept.values())
        assert not accumulated
        both = torch.autograd.grad(loss_of(wrapped, x, target), [x, *kept.values()])
        for other in inputs:
            (loss_of(reference, *other) / WORLD).backward()
        same(both[0], wanted, "gradient of an input, with those of parameters")
        for (name, parameter), gradient in zip(kept.items(), both[1:], strict=True):
            same(gradient, reference.get_parameter(name).grad, name)
            assert parameter.grad is None
        assert not accumulated
        x.grad = None
        loss_of(wrapped, x, target).backward(inputs=[*kept.values()] or [x])  # a stage may have no parameters
        assert sorted(accumulated) == sorted(kept)
        assert x.grad is None or not kept
        x.grad = None
        same_gradients(wrapped, reference)
        wrapped.zero_grad()
        loss_of(wrapped, x, target).backward(inputs=list(dict.fromkeys([x, *asked(kept)])))
        for name, parameter in kept.items():
            if name.endswith("weight"):
                same(parameter.grad, reference.get_parameter(name).grad, name)
            else:
                assert parameter.grad is None, name
        same(x.grad, wanted, "gradient of an input, among those asked for")
        wrapped.zero_grad()
        pyrannc.delay_grad_allreduce(True)
        loss_of(wrapped, x, target).backward(inputs=asked(kept))
        loss, given = loss_of(wrapped, x, target), asked(kept)
        if STAGES == 1:  # all ranks have parameters
            refused(StepError, "allreduce_grads", lambda loss=loss, given=given: torch.autograd.grad(loss, given))
        pyrannc.delay_grad_allreduce(False)
        wrapped.allreduce_grads()
        for name, parameter in kept.items():
            assert (parameter.grad is None) != name.endswith("weight"), name
        x.grad = None


def an_empty_batch_whose_gradients_wait() -> None:
    """A rank that has computed nothing has nothing that waits, and takes part all the same."""
    if WORLD == 1:
        return
    reference, wrapped = pair(Net)
    rows = [8] * (WORLD - 1) + [0]
    for rank in range(WORLD - 1):
        (reference(*batch(rank, seed=1))["loss"] * rows[rank] / sum(rows)).backward()
    all_ranks(reference, seed=2)
    for last, seed, mine in ((False, 1, rows[RANK]), (True, 2, 8)):
        pyrannc.delay_grad_allreduce(not last)
        x, target = batch(RANK, seed=seed)
        found = wrapped(x[:mine], target[:mine])
        found["loss"].backward()
        assert bool(found["hits"]) <= bool(mine), found["hits"]
    same_gradients(wrapped, reference)


def gradients_that_differ_between_ranks() -> None:
    reference, wrapped = pair(Net)
    loss = wrapped(*batch(RANK))["loss"]
    if WORLD > 1:  # what nothing is moved for is compared at the next occasion; nothing gets past it
        (loss * (RANK + 1)).backward()
        for again in (lambda: wrapped(*batch(RANK)), wrapped.state_dict):
            refused(StepError, "differs between ranks ([1.0, 2.0", again)
        pyrannc.clear()
        reference, wrapped = pair(Net)
        loss = wrapped(*batch(RANK))["loss"]
        if RANK:
            loss.backward()
        refused(StepError, "rank 0 has run backward of the calls [], rank 1 of [0]", lambda: wrapped(*batch(RANK)))
        pyrannc.clear()
        reference, wrapped = pair(Net)
        loss = wrapped(*batch(RANK))["loss"]
        pyrannc.delay_grad_allreduce(RANK > 0)
        loss.backward()
        refused(StepError, "calls [0], rank 1 of [0 (delayed)]", wrapped.state_dict)
        pyrannc.clear()
        reference, wrapped = pair(Net)
        pyrannc.delay_grad_allreduce(RANK > 0)
        refused(StepError, "the reduction of gradients is delayed on ranks [1", lambda: wrapped(*batch(RANK)))
        pyrannc.clear()
        reference, wrapped = pair(Net)
        wrapped(*batch(RANK))["loss"].backward()
        pyrannc.delay_grad_allreduce(True)
        wrapped(*batch(RANK))["loss"].backward()
        pyrannc.delay_grad_allreduce(False)
        loss = wrapped(*batch(RANK))["loss"]  # is reduced with what waits: ranks have to talk
        refused(StepError, "interleave_loss=false", lambda: (loss * (RANK + 1)).backward())
        pyrannc.clear()
    os.environ["RANNC_INTERLEAVE_LOSS"] = "false"
    reference, wrapped = pair(Net)
    all_ranks(reference, factor=lambda rank: rank + 1.0)
    (wrapped(*batch(RANK))["loss"] * (RANK + 1)).backward()
    same_gradients(wrapped, reference)
    reference, wrapped = pair(Net)
    for rank in range(WORLD):
        out = reference(*batch(rank))
        ((out["loss"] + out["large"].mean()) / WORLD).backward()
    out = wrapped(*batch(RANK))
    (out["loss"] + out["large"].mean()).backward()
    same_gradients(wrapped, reference)
    del os.environ["RANNC_INTERLEAVE_LOSS"]


class Heads(nn.Module):
    """Two outputs that each have a layer of their own, and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)])

    def forward(self, x: Tensor) -> list[Tensor]:
        x = torch.tanh(self.first(x))
        return [head(x) for head in self.heads]


def losses_of_other_outputs_on_each_rank() -> None:
    """A rank need not know which outputs the others have gradients for to compute its own."""
    reference, wrapped = pair(Heads)
    for step in range(3):
        for rank in range(WORLD):
            x, _ = batch(rank, seed=step)
            (reference(x)[(rank + step) % 2].square().sum() / WORLD).backward()
            if rank == RANK:
                wanted = x.grad
        x, _ = batch(RANK, seed=step)
        wrapped(x)[(RANK + step) % 2].square().sum().backward()
        same_gradients(wrapped, reference)
        same(x.grad * 1.0, wanted * WORLD, "gradient of the input")
    if WORLD > 1:
        found = wrapped(x)[0]
        pyrannc.delay_grad_allreduce(RANK > 0)
        refused(StepError, "gradients of parameters are reduced on ranks [0] alone", found.sum().backward)
        pyrannc.clear()
        pyrannc.delay_grad_allreduce(False)


def one_batch_for_all() -> None:
    for rows in (8, 7, 1):
        reference, wrapped = pair(Net, gather_inputs=False, outputs="all")
        x, target = batch(0, rows=rows, seed=4)
        if int((target != 2).sum()) == 0:
            target = torch.zeros_like(target)
        wanted = reference(x, target)
        (2 * wanted["loss"]).backward()
        mine = x.detach().clone().requires_grad_() if RANK == 0 else torch.ones(RANK, WIDTH, requires_grad=True)
        labels = target if RANK == 0 else torch.zeros(RANK, dtype=torch.int64)
        found = wrapped(mine, labels)
        for name in ("loss", "small", "large"):
            same(found[name], wanted[name], name)
        assert int(found["hits"]) == int(wanted["hits"])
        (2 * found["loss"]).backward()
        same_gradients(wrapped, reference)
        if RANK == 0:
            same(mine.grad, x.grad, "gradient of the input")
    for coupled in (False, True):
        if coupled:
            os.environ["RANNC_PIPELINE_NUM"] = "1"  # its mini-batch runs whole
        reference, wrapped = pair(lambda coupled=coupled: Outside(coupled), gather_inputs=False)
        x, target = batch(0, seed=4)
        wanted = reference(x)
        nn.functional.cross_entropy(wanted, target, reduction="sum").backward()
        found = wrapped(x.detach() if RANK == 0 else torch.zeros(3, WIDTH))
        same(found, wanted, "output")
        # Only what rank 0 makes of the outputs counts.
        nn.functional.cross_entropy(found, target if RANK == 0 else target * 0, reduction="sum").backward()
        same_gradients(wrapped, reference)
    reference.eval(), wrapped.eval()
    with torch.no_grad():
        same(wrapped(x.detach()), reference(x), "output in evaluation")
    if WORLD > 1:
        refused(StepError, "same structure", lambda: wrapped(*[x.detach()] * (1 + RANK)))


outputs_beside_a_loss()
several_backwards()
several_forwards()
switching_between_forward_and_backward()
tensors_that_are_written_into()
gradients_that_are_asked_for()
an_empty_batch_whose_gradients_wait()
gradients_that_differ_between_ranks()
losses_of_other_outputs_on_each_rank()
one_batch_for_all()
print(f"rank {RANK}: calls: all equal", flush=True)
