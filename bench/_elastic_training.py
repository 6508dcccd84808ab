"""Training script for bench/elastic.py: a GPT on random tokens, elastically.

    rannc-run --elastic -np 2 bench/_elastic_training.py FOLDER [--end STEP --every STEPS --layers 12 ..]

Each rank writes its process number to FOLDER/RANK; rank 0 appends a `Step`, as JSON, to FOLDER/steps after each step.
Checkpoints are in FOLDER/checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any, TypedDict

HEAD = 64
"""Width of an attention head."""


class Step(TypedDict):
    """A step of rank 0. Times are seconds since the epoch, comparable with those of other processes."""

    step: int
    at: float
    """Its end."""
    took_s: float
    """From the batch to the end; preparing the model is part of a start's first step."""
    pid: int
    """The process: another one, another start."""
    import_s: float
    """Seconds in which this process imported torch, with what torch.optim imports later."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--end", type=int, default=100_000, help="step after which the training is over")
    parser.add_argument("--every", type=int, default=1_000_000, help="steps between checkpoints")
    for name in ("rows", "length", "layers", "width", "words"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    begun = time.perf_counter()
    import torch
    import torch._dynamo  # torch.optim imports it with the first optimizer

    import_s = time.perf_counter() - begun

    from torch.utils.data import DataLoader, Dataset

    import pyrannc

    class Tokens(Dataset[Any]):
        def __len__(self) -> int:
            return given.rows * given.end

        def __getitem__(self, index: int) -> Any:
            return torch.randint(given.words, (given.length,), generator=torch.Generator().manual_seed(index))

    rank = pyrannc.get_rank()
    (given.folder / str(rank)).write_text(str(os.getpid()))
    torch.manual_seed(0)
    with pyrannc.DistributeModelParams():  # a start that goes on from a checkpoint computes no initial values
        net = model(given.layers, given.width, given.words, given.length)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    wrapped = pyrannc.RaNNCModule(net, optimizer)
    data = Tokens()
    sampler = pyrannc.ElasticSampler(data, given.rows, shuffle=False)
    state = pyrannc.elastic(
        wrapped, optimizer, sampler=sampler, directory=given.folder / "checkpoints", every=given.every
    )
    for tokens in DataLoader(data, batch_sampler=sampler):
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = wrapped(tokens)
        loss.backward()
        optimizer.step()
        took_s = time.perf_counter() - begun
        if rank == 0:
            told = Step(step=state.step, at=time.time(), took_s=took_s, pid=os.getpid(), import_s=import_s)
            with (given.folder / "steps").open("a") as file:
                file.write(json.dumps(told) + "\n")


def model(layers: int, width: int, words: int, length: int) -> Any:
    """A GPT with its loss: rows of tokens in, the mean loss of the next tokens out."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = self.inner(self.before(x)).unflatten(2, (3, width // HEAD, HEAD)).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
            x = x + self.outer(seen.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.after(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(words, width)
            # With torch's own N(0, 1) the tied head's softmax underflows, and products of denormal numbers are slow.
            nn.init.normal_(self.tokens.weight, std=0.02)
            self.places = nn.Parameter(torch.zeros(length, width))
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, words, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.blocks(self.tokens(ids) + self.places))
            logits = self.head(x[:, :-1])
            return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return Gpt()


if __name__ == "__main__":
    main()
