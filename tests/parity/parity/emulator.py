"""Training as W data-parallel ranks would do it, in one process and without pyrannc.

Every rank has a replica of the model. What is local to a rank (outputs, input gradients, gradients
not reduced yet) lives in its replica; parameters, reduced gradients and the optimizer in the master::

    mini-batch r ──► replica r ──► local gradients ─┐ mean over ranks
                        ▲                           ▼
                        └── parameters ── master.grad ──► optimizer

Buffers are rank 0's after every call.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.case import Case
from parity.record import Record, array, put_gradients, put_input_gradients, put_outputs
from parity.script import play
from parity.zoo import OPTIMIZERS, ZOO, Batch, build_batch, build_model


@dataclass(frozen=True)
class _Call:
    """One forward of all ranks, waiting for its backward."""

    name: str
    batches: tuple[Batch, ...]
    objectives: tuple[Tensor, ...]
    """Of each rank, weighted such that the mean over ranks of their gradients is the wanted one."""


class Emulator:
    """Plays a script for all ranks at once (`script.Trainer`)."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.entry = ZOO[case.model]
        self.master = build_model(case, rank=0)
        self.optimizer = OPTIMIZERS[case.optimizer](self.master)
        self.replicas = [copy.deepcopy(self.master) for _ in range(case.ranks)]
        self.shared: Record = {}
        self.local: list[Record] = [{} for _ in range(case.ranks)]
        self._delayed = False
        self._waiting: list[_Call] = []

    def records(self) -> list[Record]:
        """What each rank has to see, parameters it does not own included."""
        return [{**self.shared, **local} for local in self.local]

    def zero(self) -> None:
        for model in (self.master, *self.replicas):
            model.zero_grad(set_to_none=True)

    def forward(self, step: int, call: int) -> None:
        name = f"{step}/{call}"
        batches, objectives = [], []
        for rank, replica in enumerate(self.replicas):
            batch, rows = build_batch(self.case, step, call, rank)
            output = replica(*batch[0], **batch[1])
            objective = self._weighted(output, rows, step)
            put_outputs(self.local[rank], f"{name}/out", output, without_scalars=self.entry.loss != "outside")
            batches.append(batch)
            objectives.append(objective)
        self._share_buffers()
        self._put_losses(f"{name}/loss", objectives)
        self._waiting.append(_Call(name, tuple(batches), tuple(objectives)))

    def _weighted(self, output: Any, rows: int, step: int) -> Tensor:
        """A rank's objective, such that the mean over ranks is the global one.

        For a mean loss inside the model that is sum_r n_r/N L_r, hence the factor n_r W/N here (1 for
        even mini-batches); a mini-batch without rows takes no part, whatever its loss (nan) is.
        """
        if self.entry.loss == "mean":
            if rows == 0:
                return torch.zeros((), dtype=torch.float64, requires_grad=True)
            return self.entry.objective(output, rows) * (rows * self.case.ranks / self.case.total_rows(step))
        return self.entry.objective(output, rows)

    def _put_losses(self, name: str, objectives: list[Tensor]) -> None:
        """A loss outside is a rank's own, one inside the model is global and the same on all ranks."""
        for record, objective in zip(self.local, objectives, strict=True):
            record[name] = array(objective if self.entry.loss == "outside" else torch.stack(objectives).mean())

    def _share_buffers(self) -> None:
        first, *others = self.replicas
        for model in (self.master, *others):
            for mine, theirs in zip(model.buffers(), first.buffers(), strict=True):
                # .data: the version counter must not move, a waiting backward may have saved the buffer
                mine.data.copy_(theirs.data)

    def backward(self, scale: float) -> None:
        for rank in range(self.case.ranks):
            total = torch.stack([call.objectives[rank] for call in self._waiting]).sum() * scale
            total.backward()
            for call in self._waiting:
                put_input_gradients(self.local[rank], f"{call.name}/input", call.batches[rank])
        self._waiting = []
        if not self._delayed:
            self.allreduce()

    def delay(self, on: bool) -> None:
        self._delayed = on

    def allreduce(self) -> None:
        """Adds the mean over ranks of the local gradients to the master's."""
        for parameters in zip(self.master.parameters(), *(r.parameters() for r in self.replicas), strict=True):
            master, *replicas = parameters
            found = [p.grad for p in replicas if p.grad is not None]
            if found:
                mean = torch.stack(found).sum(dim=0) / self.case.ranks
                master.grad = mean if master.grad is None else master.grad + mean
            for parameter in replicas:
                parameter.grad = None

    def optimize(self, step: int) -> None:
        put_gradients(self.shared, step, {name: p.grad for name, p in self.master.named_parameters()})
        self.optimizer.step()
        for replica in self.replicas:
            with torch.no_grad():
                for mine, theirs in zip(replica.parameters(), self.master.parameters(), strict=True):
                    mine.copy_(theirs)

    def look(self, step: int, call: int, *, training: bool) -> None:
        name = f"{step}/{call}/{'probe' if training else 'eval'}"
        objectives = []
        for rank, replica in enumerate(self.replicas):
            batch, rows = build_batch(self.case, step, call, rank)
            replica.train(training)
            with torch.no_grad():
                output = replica(*batch[0], **batch[1])
                objectives.append(self._weighted(output, rows, step))
            replica.train()
            put_outputs(self.local[rank], name, output, without_scalars=self.entry.loss != "outside")
        self._put_losses(f"{name}loss", objectives)
        self._share_buffers()

    def decay(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def finish(self) -> None:
        """Write down what is left after the last step."""
        for name, parameter in self.master.named_parameters():
            self.shared[f"end/param/{name}"] = array(parameter)
        for name, value in self.master.state_dict().items():
            self.shared[f"end/state/{name}"] = array(value)


def emulate(case: Case) -> list[Record]:
    """What every rank of a case has to record, plan left out."""
    emulator = Emulator(case)
    play(case, emulator)
    emulator.finish()
    return emulator.records()
