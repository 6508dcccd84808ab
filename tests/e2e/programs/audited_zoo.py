"""Audits the second step of models of the zoo: a false alarm is an error.

usage: audited_zoo.py [MODEL ..]    names of models; none: all of them
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from yardstick import RANK

import pyrannc
from rannd.errors import AuditError, PlanError

sys.path.append(str(Path(__file__).parents[2]))  # forks read no PYTHONPATH
from zoo import ZOO, Entry


def loss_of(output: object) -> torch.Tensor:
    """A loss: the model's own, or made of its first output that is trained."""
    leaves = [each for each in torch.utils._pytree.tree_leaves(output) if isinstance(each, torch.Tensor)]
    trained = [each for each in leaves if each.requires_grad and (each.is_floating_point())]
    return next((each for each in trained if not each.shape), trained[0]).double().pow(2).mean()


def train(entry: Entry) -> str:
    """Three steps of a model, of which the second is audited."""
    with entry.precision():
        torch.manual_seed(3)
        inner = entry.build()
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
        model = pyrannc.RaNNCModule(inner, optimizer)
        for step in range(3):
            torch.manual_seed(100 * step + RANK)
            optimizer.zero_grad()
            loss_of(model(**entry.batch(4))).backward()
            optimizer.step()
        audits = model._session.audits
        assert audits.steps == 3
        return "audited" if audits.audited else "refused"


wanted = [entry for entry in ZOO if not sys.argv[1:] or entry.name in sys.argv[1:]]
for entry in wanted:
    told = ""
    for microbatches in ("2", "1"):  # models whose samples depend on each other have one
        os.environ["RANNC_PIPELINE_NUM"] = microbatches
        try:
            told = train(entry)
            break
        except AuditError as alarm:
            told = f"ALARM {alarm}"
            break
        except PlanError as refused:  # equal on all ranks, before anything runs
            told = f"not trained: {refused}"
            pyrannc.clear()
    if RANK == 0:
        print(f"zoo: {entry.name}: {told}", flush=True)
    pyrannc.clear()
