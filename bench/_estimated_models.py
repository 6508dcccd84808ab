"""The models whose estimates are compared with measurements, in sizes for a CPU core and for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel


@dataclass(frozen=True)
class Sizes:
    """(width, layers, rows) of linear layers and of GPT-2, (width, rows) of convolutions; tokens and words of GPT-2."""

    linear: tuple[tuple[int, int, int], ...]
    digits: tuple[tuple[int, int], ...]
    gpt2: tuple[tuple[int, int, int], ...]
    length: int = 128
    words: int = 2048


CPU = Sizes(((512, 8, 128), (1024, 6, 64)), ((32, 64), (64, 32)), ((128, 4, 16), (256, 6, 8)))
GPU = Sizes(((4096, 8, 4096), (8192, 4, 2048)), ((256, 4096),), ((768, 12, 16), (1024, 24, 8)), 1024, 50257)
TINY = Sizes(((64, 4, 16),), ((4, 8),), ((32, 2, 4),), 16, 64)


class Linears(nn.Module):
    """Linear layers without anything between them."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - target).pow(2).sum(dim=1).mean()


class Digits(nn.Module):
    """The convolutions of examples/digits.py."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def block(channels_in: int, channels_out: int) -> nn.Module:
            convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())

        self.features = nn.Sequential(
            block(1, width), block(width, width), nn.MaxPool2d(2), block(width, 2 * width), nn.Flatten()
        )
        self.classifier = nn.Linear(2 * width * 16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.classifier(self.features(images)), labels)


class Gpt(nn.Module):
    """GPT-2 of transformers that returns its loss alone."""

    def __init__(self, width: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        sizes = {"n_embd": width, "n_layer": layers, "n_head": max(1, width // 64), "vocab_size": words}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        tokens = {"n_positions": length, "bos_token_id": 0, "eos_token_id": 1}
        self.gpt = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **tokens, use_cache=False))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(input_ids=tokens, labels=tokens).loss


def models(sizes: Sizes) -> Iterator[tuple[str, Callable[[], nn.Module], tuple[Any, ...], bool]]:
    """Yield (name, constructor, arguments, whether mini-batches cannot be split into microbatches)."""
    for hidden, layers, rows in sizes.linear:
        given = torch.randn(rows, hidden), torch.randn(rows, hidden)
        yield f"linear {hidden} x {layers}", lambda h=hidden, n=layers: Linears(h, n), given, False
    for width, rows in sizes.digits:
        images = torch.randn(rows, 1, 8, 8), torch.randint(10, (rows,))
        yield f"digits {width}", lambda w=width: Digits(w), images, True
    for width, layers, rows in sizes.gpt2:
        yield (
            f"GPT-2 {width} x {layers}",
            lambda w=width, n=layers: Gpt(w, n, sizes.words, sizes.length),
            (torch.randint(sizes.words, (rows, sizes.length)),),
            False,
        )
