"""Trains until a better plan is taken in the middle, and some steps more; compares with one process.

usage: replanned.py {accumulate|both|foreign|plain|saved} [STEPS [DIRECTORY]]
       replanned.py {refused|unsendable}

accumulate   a step adds the gradients of two calls, and clips them
both         two calls before both backwards
foreign      the plan that is found is for another graph
saved        with asynchronous checkpoints after every third step, from which it goes on
refused      the change does not pay, because it is said to take 1000 s
unsendable   the optimizer's state cannot be sent, so that the model cannot be undeployed
"""

from __future__ import annotations

import sys
import threading
import time

import torch
from msgspec.structs import replace
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, StepLR

import pyrannc
from rannd.plan import measured_step
from rannd.plan.deployment import decode, encode
from rannd.runtime.elastic.elastic_state import ElasticState
from rannd.runtime.planning import calibration_of_job
from rannd.runtime.planning.plan_ahead import Better
from rannd.runtime.planning.replanning import Replanning

measured_step.BUSY, calibration_of_job.DOUBTFUL = float("inf"), float("inf")  # other tests run beside

WAY, STEPS = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0
CALLS = 2 if WAY in ("accumulate", "both") else 1
TOTAL = 10_000 if WAY == "refused" else None
WIDTH, ROWS, MOST_S, MORE = 256, 256, 120.0, 16  # rows: computing counts most, messages beside other tests vary


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).square().mean()


class Training:
    """The same for all ranks, or in one process."""

    def __init__(self, *, alone: bool) -> None:
        torch.manual_seed(0)
        model = Model().double()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler: LRScheduler = StepLR(self.optimizer, 7, gamma=0.9)
        self.model = model if alone else pyrannc.RaNNCModule(model, self.optimizer, total_calls=TOTAL)
        self.ranks = range(pyrannc.get_world_size()) if alone else (pyrannc.get_rank(),)

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        losses = []
        for call in range(CALLS):
            losses.append(self.model(torch.cat([batch(CALLS * number + call, rank) for rank in self.ranks])))
            if WAY != "both":
                losses[-1].backward()
        for loss in losses if WAY == "both" else ():
            loss.backward()
        if WAY == "accumulate":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        self.scheduler.step()
        return sum(loss.item() for loss in losses)

    def elastic(self) -> ElasticState:
        return pyrannc.elastic(self.model, self.optimizer, self.scheduler, directory=sys.argv[3], every=3)


def batch(number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    rows = ROWS // 2 if number % 5 == 4 else ROWS  # as at the end of an epoch
    return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)


def for_another_graph(better: Better) -> Better:
    plan = replace(decode(better.deployment), graph_hash="0" * 40)
    return replace(better, deployment=encode(plan))


def main() -> None:
    training = Training(alone=False)
    state = training.elastic() if WAY == "saved" else None
    start = 0 if state is None else state.step
    losses, more, begun = [training.step(start)], 0, time.monotonic()
    first, session = training.model.deployment.stages, training.model._session
    found = threading.Event()
    if WAY == "foreign":
        session._replanning.on_all_ranks = lambda world: for_another_graph(
            Replanning.on_all_ranks(session._replanning, world)
        )
    if WAY == "refused":
        session._replanning.moving_s = 500.0
    for kept in training.optimizer.state.values() if WAY == "unsendable" else ():
        kept["lock"] = threading.Lock()
    if WAY in ("refused", "unsendable"):
        session._replanning.found = lambda better: (Replanning.found(session._replanning, better), found.set())
    while more < MORE and start + len(losses) != STEPS:
        losses.append(training.step(start + len(losses)))
        ended = session.world.broadcast_bytes(bytes([found.is_set()])) != b"\0"
        more += ended or training.model.deployment.stages != first
        assert more or time.monotonic() - begun < MOST_S, "no better plan was found"
    if training.model.deployment.stages != first:
        assert [rank.steps for rank in session.measuring.measured.ranks] == [8, 8], (
            "those of the plan before count, too"
        )
    if state is not None:
        state.save()
    values = training.model.state_dict()
    if pyrannc.get_rank() == 0:
        alone = Training(alone=True)
        for number in range(start):
            alone.step(number)
        off = max(abs(alone.step(start + number) - loss) for number, loss in enumerate(losses))
        expected = alone.model.state_dict()
        off = max(off, *(float((values[name] - value).abs().max()) for name, value in expected.items()))
        changed = training.model.deployment.stages != first
        print(f"STEPS {len(losses)}, {more if changed else 0} of them with another plan, off by {off:.1e}", flush=True)
        assert off < 1e-9
    pyrannc.barrier()


if __name__ == "__main__":
    main()
