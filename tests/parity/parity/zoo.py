"""Models with their data and objectives, and the optimizers that train them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from parity import blocks, masked_losses
from parity.blocks import CLASSES, SEQUENCE, TOKENS, WIDTH
from parity.case import Case
from parity.record import leaves

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model with everything that is needed to train it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    """(rows, generator) -> arguments of one call; deterministic."""
    loss: Literal["outside", "mean", "sum"] = "outside"
    """Who computes the loss: the user from the outputs of a rank, or the model, reduced as said."""
    pick: Callable[[Any], Tensor] | None = None
    """output -> the model's own loss; None with loss="outside"."""
    use: Callable[[Any], Any] = lambda output: output
    """The part of the outputs that a loss outside is made of."""
    labels: bool = False
    """The mean is over the labels that count, not over rows."""
    coupled: bool = False
    """Rows depend on each other: a mini-batch cannot be cut into microbatches."""
    empty: bool = True
    """The model itself can run a mini-batch without rows."""

    def objective(self, output: Any, rows: int) -> Tensor:
        """What a rank calls backward on; 0 (not nan) for a mini-batch without rows and a loss outside."""
        if self.pick is not None:
            return self.pick(output)
        # Not the mean over elements: torch's mean of nothing is nan. The weight makes columns differ.
        total = torch.zeros((), dtype=torch.float64)
        for value in leaves(self.use(output)).values():
            flat = value.reshape(rows, -1) if rows else value.reshape(0, 1)
            total = total + ((flat - 0.3).pow(2) * torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype)).sum()
        return total / max(rows, 1)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _tokens(generator: torch.Generator, rows: int, high: int) -> Tensor:
    return torch.randint(0, high, (rows, SEQUENCE), generator=generator)


def _one(rows: int, generator: torch.Generator) -> Batch:
    return (_normal(generator, rows, WIDTH).requires_grad_(),), {}


def _plain(rows: int, generator: torch.Generator) -> Batch:
    return (_normal(generator, rows, WIDTH),), {}


def _two(rows: int, generator: torch.Generator) -> Batch:
    return (_normal(generator, rows, WIDTH).requires_grad_(), _normal(generator, rows, WIDTH)), {}


def _sequence(rows: int, generator: torch.Generator) -> Batch:
    return (_normal(generator, rows, SEQUENCE, WIDTH).requires_grad_(),), {}


def _image(rows: int, generator: torch.Generator) -> Batch:
    return (_normal(generator, rows, 2, 5, 5).requires_grad_(),), {}


def _labelled_image(rows: int, generator: torch.Generator) -> Batch:
    return (_normal(generator, rows, 2, 5, 5), torch.randint(0, CLASSES, (rows,), generator=generator)), {}


def _text(rows: int, generator: torch.Generator) -> Batch:
    return (_tokens(generator, rows, TOKENS),), {}


def _nested(rows: int, generator: torch.Generator) -> Batch:
    scale = _normal(generator, rows).requires_grad_()
    extra = {"bias": _normal(generator, rows, WIDTH).requires_grad_()}
    return (_normal(generator, rows, WIDTH).requires_grad_(),), {"scale": scale, "absent": None, "extra": extra}


def _mask(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Labels with a different number of padded places in each row; the second place never is one."""
    length = torch.randint(2, SEQUENCE + 1, (labels.shape[0], 1), generator=generator)
    return labels.masked_fill(torch.arange(SEQUENCE) >= length, -100)


def _masked(rows: int, generator: torch.Generator) -> Batch:
    labels = _mask(_tokens(generator, rows, CLASSES), generator)
    return (_tokens(generator, rows, TOKENS), labels), {}


def _causal(rows: int, generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, rows, TOKENS)
    return (), {"input_ids": tokens, "labels": tokens.clone()}


def _causal_masked(rows: int, generator: torch.Generator) -> Batch:
    tokens = _tokens(generator, rows, TOKENS)
    return (), {"input_ids": tokens, "labels": _mask(tokens, generator)}


def _translated(rows: int, generator: torch.Generator) -> Batch:
    """Sources and targets of different lengths, both padded."""
    source = _tokens(generator, rows, TOKENS)
    length = torch.randint(3, SEQUENCE + 1, (rows, 1), generator=generator)
    mask = (torch.arange(SEQUENCE) < length).long()
    labels = _mask(_tokens(generator, rows, TOKENS), generator)[:, :-1].contiguous()
    return (), {"input_ids": source * mask, "attention_mask": mask, "labels": labels}


def _itself(output: Tensor) -> Tensor:
    return output


ZOO: dict[str, Entry] = {
    "tutorial": Entry(build=blocks.Tutorial, batch=_one),
    "mean": Entry(build=lambda: blocks.InsideLoss("mean"), batch=_two, loss="mean", pick=_itself),
    "sum": Entry(build=lambda: blocks.InsideLoss("sum"), batch=_two, loss="sum", pick=_itself),
    "skip": Entry(build=blocks.Skip, batch=_one),
    "tied": Entry(build=blocks.Tied, batch=_one),
    "gpt2": Entry(build=blocks.gpt2, batch=_causal, loss="mean", labels=True, pick=lambda out: out.loss, empty=False),
    "gpt2masked": Entry(
        build=lambda: blocks.gpt2("eager"),
        batch=_causal_masked,
        loss="mean",
        labels=True,
        pick=lambda out: out["loss"],
        empty=False,
    ),
    "convnorm": Entry(build=blocks.ConvNorm, batch=_image, coupled=True, empty=False),
    "convloss": Entry(
        build=blocks.ConvNormLoss,
        batch=_labelled_image,
        loss="mean",
        labels=True,
        pick=_itself,
        coupled=True,
        empty=False,
    ),
    "convmean": Entry(
        build=blocks.ConvMean, batch=_labelled_image, loss="mean", labels=True, pick=_itself, empty=False
    ),
    "lstm": Entry(build=blocks.Recurrent, batch=_text, empty=False),
    "nested": Entry(build=blocks.Nested, batch=_nested),
    "auxiliary": Entry(build=blocks.Auxiliary, batch=_one, use=lambda out: out["logits"]),
    "counter": Entry(build=blocks.Counter, batch=_one),
    "latereader": Entry(build=blocks.LateReader, batch=_one),
    "running": Entry(build=blocks.Running, batch=_one, coupled=True, empty=False),
    "opaque": Entry(build=blocks.Opaque, batch=_one, coupled=True, empty=False),
    "untraceable": Entry(build=blocks.Untraceable, batch=_one, coupled=True, empty=False),
    "frozen": Entry(build=blocks.Frozen, batch=_one),
    "finetuned": Entry(build=blocks.FineTuned, batch=_plain),
    "filled": Entry(build=blocks.Filled, batch=_one),
    "spectral": Entry(build=blocks.Spectral, batch=_one),
    "unused": Entry(build=blocks.Unused, batch=_one),
    "inplace": Entry(build=blocks.InPlace, batch=_one),
    "attention": Entry(build=blocks.Attention, batch=_sequence, empty=False),
    "regularised": Entry(build=blocks.Regularised, batch=_two, loss="mean", pick=_itself),
    "masked": Entry(build=blocks.Masked, batch=_masked, loss="mean", labels=True, pick=lambda out: out[0]),
    "weighted": Entry(
        build=masked_losses.Weighted, batch=_masked, loss="mean", labels=True, pick=lambda out: out[0], empty=False
    ),
    "t5": Entry(
        build=masked_losses.t5,
        batch=_translated,
        loss="mean",
        labels=True,
        pick=lambda out: out.loss,
        use=lambda out: out.logits,
        empty=False,
    ),
    "contrastive": Entry(
        build=masked_losses.Contrastive, batch=_two, loss="mean", pick=_itself, coupled=True, empty=False
    ),
}


EPS = 1e-6
"""Of Adam's, 100 times its default. It divides gradients by their own size, so it blows rounding noise of
a gradient that is zero mathematically (the bias of attention's keys) up by lr / eps; for the same reason
Adam runs without L2 decay here, which would feed that noise back and multiply it in every step."""


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1, "lr": 2e-3}, {"params": vectors, "weight_decay": 0.0}],
        lr=5e-3,
        eps=EPS,
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=3e-3, eps=EPS),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=EPS),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=5e-3, eps=EPS),
    "groups": _groups,
}


def build_model(case: Case, rank: int) -> nn.Module:
    """The model as `rank` would build it. Ranks are seeded differently on purpose: rank 0's values must win."""
    torch.manual_seed(7 + 100 * rank)
    return ZOO[case.model].build().to(getattr(torch, case.precision)).train()


def build_batch(case: Case, step: int, call: int, rank: int) -> tuple[Batch, int]:
    """Arguments of `rank`'s call number `call` in `step`, and their rows."""
    rows = case.rows_of(step, rank)
    generator = torch.Generator().manual_seed(1 + rank + 16 * (call + 16 * step))
    batch = ZOO[case.model].batch(rows, generator)
    if case.precision != "float64":
        batch = tree_map_only(Tensor, lambda value: _cast(value, getattr(torch, case.precision)), batch)
    return batch, rows


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A leaf of another dtype; whole numbers stay as they are."""
    return value.detach().to(dtype).requires_grad_(value.requires_grad) if value.is_floating_point() else value
