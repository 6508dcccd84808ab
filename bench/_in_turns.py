"""Compares ways to train in one job: GPT-2 and its steps, run in turns by all ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any


@dataclass(frozen=True)
class GptSizes:
    """Of GPT-2, and of a rank's mini-batch."""

    layers: int = 6
    width: int = 256
    words: int = 8192
    length: int = 128
    rows: int = 8


@dataclass(frozen=True)
class Training:
    """A wrapped model, its optimizer, and a step of them, which returns the loss."""

    wrapped: Any
    optimizer: Any
    step: Callable[[], Any]


def gpt2(sizes: GptSizes) -> Any:
    """GPT-2 of transformers, without dropout; its parameters are the same in every process."""
    import torch
    import transformers

    config = transformers.GPT2Config(
        vocab_size=sizes.words, n_positions=sizes.length, n_embd=sizes.width, n_layer=sizes.layers, n_head=4,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).train()


def random_tokens(sizes: GptSizes, rank: int) -> Any:
    """A rank's mini-batch."""
    import torch

    return torch.randint(sizes.words, (sizes.rows, sizes.length), generator=torch.Generator().manual_seed(rank))


def training(sizes: GptSizes, rank: int, wrap: Callable[[Any, Any], Any]) -> Training:
    """GPT-2 in what `wrap` makes of it and of its AdamW."""
    import torch

    model, tokens = gpt2(sizes), random_tokens(sizes, rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wrapped = wrap(model, optimizer)

    def step() -> Any:
        optimizer.zero_grad()
        loss = wrapped(input_ids=tokens, labels=tokens)["loss"]
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(wrapped, optimizer, step)


def compare(
    sides: Mapping[str, Callable[[], Any]], rounds: int, steps: int, pairs: Sequence[tuple[str, str]] = ()
) -> dict[str, float]:
    """Run `steps` steps of each side in turns; rank 0 prints times and ratios, and returns these (see `tell`).

    The order is reversed every other round; the first round is dropped. Collective.
    """
    import pyrannc

    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            pyrannc.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            pyrannc.barrier()
            times[name].append((time.perf_counter() - start) / steps)
    return {} if pyrannc.get_rank() else tell({name: values[1:] for name, values in times.items()}, pairs)


def tell(kept: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]] = ()) -> dict[str, float]:
    """Print the times of steps, given in seconds, and the ratios of speed of pairs of sides; return their medians.

    Without pairs: of the first side to each other one. In parentheses are the 5th and the 95th percentile; of fewer
    than 20 rounds these are the smallest and the largest.
    """
    first, *others = kept
    for name, values in kept.items():
        low, middle, high = _spread([1e3 * value for value in values])
        print(f"{name:28s} step {middle:8.1f} ms ({low:.1f} to {high:.1f})")
    medians = {}
    for one, other in pairs or [(first, each) for each in others]:
        low, middle, high = _spread([b / a for a, b in zip(kept[one], kept[other], strict=True)])
        medians[f"{one} / {other}"] = middle
        print(f"{one} / {other}: {middle:.3f} ({low:.3f} to {high:.3f})", end=" ")
        print(f"over {len(kept[one])} rounds, torch {version('torch')}")
    return medians


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """5th percentile, median, 95th percentile."""
    ordered = sorted(values)
    outer = int(0.05 * len(ordered))
    return ordered[outer], statistics.median(ordered), ordered[-1 - outer]
