"""Ranks pass sequences of different lengths, as a collate function pads them to the longest of its own mini-batch.

Each rank compares its losses, gradients and parameters with one process that has the mini-batches of all ranks. Prints
``lengths: right`` on each rank.

usage: lengths.py inside|outside [apart] [large] [refused] [uneven] [branch] [few] [cut]
inside   the model computes the loss
apart    results of samples do not depend on each other, so that there can be several microbatches
large    logits are too large to be sent, for long sequences, and so are not sent for any
uneven   ranks have different numbers of samples, one of them none at times
branch   what the model does depends on values, in which ranks with sequences of one length differ
few      a model keeps few graphs
cut      the second stage begins with an operator without parameters
refused  long sequences take another layer; with several stages ranks may not pass both
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyrannc
from rannd.errors import StepError, TraceError
from rannd.runtime.binding.traffic import LARGE_OUTPUT
from rannd.runtime.calls import graph_table

torch.set_default_dtype(torch.float64)
RANK, WORLD = pyrannc.get_rank(), pyrannc.get_world_size()
LOSS_INSIDE = sys.argv[1] == "inside"
APART, LARGE, REFUSED = (word in sys.argv for word in ("apart", "large", "refused"))
UNEVEN, BRANCH, FEW, CUT = (word in sys.argv for word in ("uneven", "branch", "few", "cut"))
WIDTH, TOKENS, PAD = 8, 1500 if LARGE else 11, 0


class Net(nn.Module):
    """An encoder with a padding mask, tied weights, and a norm whose buffers are written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH, padding_idx=PAD)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.cut = pyrannc.CutPoint() if CUT else nn.Identity()
        self.norm = nn.GroupNorm(2, WIDTH) if APART else nn.BatchNorm1d(WIDTH)
        self.of_long = nn.Linear(WIDTH, WIDTH) if REFUSED else nn.Identity()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        hidden = self.encoder(self.embed(tokens), src_key_padding_mask=tokens == PAD)
        hidden = torch.tanh(self.cut(hidden))
        if BRANCH and tokens.max() == TOKENS - 1:
            hidden = 2 * hidden
        if REFUSED and tokens.shape[1] > 6:
            hidden = self.of_long(hidden)
        logits = self.head(self.norm(hidden.transpose(1, 2)).transpose(1, 2))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels), logits


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Rows of lengths that differ between ranks (with `branch` between pairs of ranks) in all steps but the second."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    length = 6 if step == 1 else 4 + (3 * (rank // 2 if BRANCH else rank) + 2 * step) % 7
    rows = 3
    if UNEVEN:
        rows = 1 + (rank + step) % 4
        if rank == 1 and step in (3, 6):
            rows, length = 0, 6
    tokens = torch.randint(1, TOKENS, (rows, length), generator=generator)
    tokens[:1, length - 2 :] = PAD
    return tokens, torch.randint(TOKENS, (rows, length), generator=generator)


def weight(rank: int, step: int) -> float:
    """Share of a rank's loss: a mean that the model computes is over all samples, one of the script over its own."""
    if not LOSS_INSIDE:
        return 1 / WORLD
    rows = [len(batch(each, step)[0]) for each in range(WORLD)]
    return rows[rank] / sum(rows)


def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    if LOSS_INSIDE:
        loss, logits = model(tokens, labels)
        assert logits.shape == (*tokens.shape, TOKENS)
        if LARGE and isinstance(model, pyrannc.RaNNCModule):
            assert (tokens.shape[1] * TOKENS * 8 > LARGE_OUTPUT) == (tokens.shape[1] > 5)
            with pytest.raises(StepError, match="was not sent to this rank"):
                logits.sum()
        return loss
    return nn.functional.cross_entropy(model(tokens).transpose(1, 2), labels)


if FEW:
    graph_table.MOST_GRAPHS = 3
torch.manual_seed(1)
inner = Net()
reference = copy.deepcopy(inner)
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
model = pyrannc.RaNNCModule(inner, optimizer)

for step in range(7):
    mine = None
    buffers = {name: value.clone() for name, value in reference.named_buffers()}
    kept: dict[str, Tensor] = {}
    plain.zero_grad()
    for rank in range(WORLD):
        for name, value in reference.named_buffers():
            value.copy_(buffers[name])  # each rank begins with rank 0's
        if not len(batch(rank, step)[0]):
            continue
        loss = loss_of(reference, *batch(rank, step))
        (loss * weight(rank, step)).backward()
        mine = loss if rank == RANK else mine
        kept = kept or {name: value.clone() for name, value in reference.named_buffers()}
    for name, value in reference.named_buffers():
        value.copy_(kept[name])
    plain.step()
    optimizer.zero_grad()
    if step == 0 and LOSS_INSIDE:  # nothing can be traced for sizes that come without samples
        with pytest.raises(StepError, match=r"ranks call the model in different ways: .*: pad to a common length"):
            loss_of(model, *(each[: (RANK + 1) % WORLD] for each in batch(RANK, 8)))
        pyrannc.barrier()
        with pytest.raises(TraceError, match=r"fails, at .*in different ways: rank \d passes a tensor"):
            loss_of(model, batch(RANK, step)[0], batch(RANK, step)[1][:, RANK:])
        pyrannc.barrier()
    if REFUSED:
        with pytest.raises(StepError, match=r"ranks call the model in different ways: .*exchange other values, .*pad"):
            loss_of(model, *batch(RANK, step))
        print("lengths: right", flush=True)
        sys.exit()
    found = loss_of(model, *batch(RANK, step))
    found.backward()
    optimizer.step()
    if not LOSS_INSIDE:  # a loss that the model computes is the mean over all ranks
        assert torch.allclose(found, mine, rtol=1e-9, atol=0), (step, found, mine)
    for name, value in reference.named_parameters():
        assert torch.allclose(model.get_param(name), value, rtol=1e-8, atol=1e-10), (step, name)

graphs = {executor.own for executor in model._session._graphs.executors()}
cuts = {tuple(sorted((node.name, stage) for node, stage in graph.bound.stage_of.items())) for graph in graphs}
assert len(graphs) > 1
assert BRANCH or len(cuts) == 1, "every length is cut as planned"

model.eval(), reference.eval()
with torch.no_grad():
    tokens, _ = batch(RANK, 9)
    assert torch.allclose(model(tokens), reference(tokens), rtol=1e-8, atol=1e-10)
state = model.state_dict()
if RANK == 0:
    for name, value in reference.state_dict().items():
        assert torch.allclose(state[name].double(), value.double(), rtol=1e-8, atol=1e-10), name
print("lengths: right", flush=True)
