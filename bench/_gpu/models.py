"""The models that are trained, and mini-batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def gpt2(layers: int, width: int, words: int, length: int, dropout: float = 0.0, heads: int = 0) -> nn.Module:
    """GPT-2 of transformers, with tied embeddings, in training mode; called with `input_ids` and `labels`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=words, n_positions=length, n_embd=width, n_layer=layers, n_head=heads or max(1, width // 64),
        use_cache=False, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


class Text(nn.Module):
    """GPT-2 with a loss in its own dtype; that of transformers is in float32."""

    def __init__(self, layers: int, width: int, words: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gpt = gpt2(layers, width, words, length, dropout, heads=4)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = self.gpt(input_ids=tokens).logits
        return {
            "logits": logits,
            "loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()),
        }


def tokens(seed: int, rows: int, length: int, words: int) -> dict[str, Tensor]:
    """A mini-batch of `Text`: int64 of (rows, length)."""
    return {"tokens": torch.randint(words, (rows, length), generator=torch.Generator().manual_seed(seed))}


class Mlp(nn.Module):
    """Linear layers; the script computes the loss."""

    def __init__(self, width: int = 16, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(depth):
            parts += [nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Convolutions(nn.Module):
    """Convolutions with BatchNorm, whose buffers a step changes, and a loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

        self.features = nn.Sequential(block(1, width), block(width, width), nn.MaxPool2d(2), block(width, 2 * width))
        self.classifier = nn.Linear(2 * width * 16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = nn.functional.cross_entropy(self.classifier(self.features(images).flatten(1)), labels)
        return found


def images(seed: int, rows: int) -> dict[str, Tensor]:
    """A mini-batch of `Convolutions`: float64 of (rows, 1, 8, 8)."""
    made = torch.Generator().manual_seed(seed)
    return {
        "images": torch.randn(rows, 1, 8, 8, generator=made, dtype=torch.float64),
        "labels": torch.randint(10, (rows,), generator=made),
    }


def numbers(seed: int, rows: int, width: int = 16) -> dict[str, Tensor]:
    """A mini-batch of `Mlp`: float64 of (rows, width)."""
    made = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, width, generator=made, dtype=torch.float64)}


def loss_of(output: Any) -> Tensor:
    """The loss of any of these models."""
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else output.square().sum()
    return output["loss"]  # type: ignore[no-any-return]


def on(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A mini-batch on a device."""
    return {name: tensor.to(device) for name, tensor in batch.items()}
