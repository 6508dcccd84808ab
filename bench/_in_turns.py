"""Compares ways to train in one job: GPT-2 and its steps, run in turns by all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from _results import Spread, Table


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
    title: str,
    sides: Mapping[str, Callable[[], Any]],
    rounds: int,
    steps: int,
    pairs: Sequence[tuple[str, str]] = (),
) -> dict[str, float]:
    """Run `steps` steps of each side in turns; rank 0 prints times and ratios. Returns these (see `tell`) on all ranks.

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
    return tell(title, {name: values[1:] for name, values in times.items()}, pairs)


def tell(title: str, kept: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]] = ()) -> dict[str, float]:
    """Print the times of steps, given in seconds, and the ratios of speed of pairs of sides; return their medians.

    Without pairs: of the first side to each other one. A ratio of one / other is above 1.0 where `one` is faster.
    """
    first, *others = kept
    rounds = len(kept[first])
    table = Table(f"{title}, {rounds} rounds", "side", ("step", "{:.1f} ms"), "compared with", "times as fast")
    asked = list(pairs) or [(first, each) for each in others]
    medians = {}
    for name, values in kept.items():
        step: Spread | None = Spread.of(values, 1e3)
        for other in [other for one, other in asked if one == name]:
            ratio = Spread.of([b / a for a, b in zip(values, kept[other], strict=True)])
            medians[f"{name} / {other}"] = ratio.median
            table.row(name, step, other, ratio)
            step = None
        if step is not None:
            table.row(name, step, None, None)
    return medians
