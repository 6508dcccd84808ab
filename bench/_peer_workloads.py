"""Models that bench/peers.py trains: each whole, as its script has it, and as a list of parts that stages are made of.

Parts are modules of the model itself, so every side starts with the same values. There is no dropout, because sides
draw random numbers in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from _in_turns import GptSizes, gpt2
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its mini-batches, and how it is trained."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    """Inputs and targets of a rank, the same in every step."""
    train: Callable[[nn.Module, Tensor, Tensor], Tensor]
    """The loss of a (wrapped) model for inputs and targets."""
    parts: Callable[[Any], list[nn.Module]]
    """The model in order: each part is called with what the one before it returns (a tuple: several arguments)."""
    loss: Loss
    """Of what the last part returns."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    blocks: Callable[[Any], Iterable[nn.Module]]
    """Layers that a user of FSDP2 would shard one by one; the rest is sharded with the model."""
    tied: Callable[[Any], nn.Parameter | None] = lambda _: None
    """A parameter that the first and the last part have in common."""


def workload(name: str, small: bool) -> Workload:
    """One of `WORKLOADS`; `small`: a few seconds of work, for tests."""
    return WORKLOADS[name](small)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _drawn(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same values in every process."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return make().train()

    return made


class Layers(nn.Module):
    """The model of examples/tutorial.py."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tutorial(small: bool) -> Workload:
    """examples/tutorial.py 64 512 10."""
    rows, hidden, layers = (8, 32, 4) if small else (64, 512, 10)

    def batch(rank: int) -> tuple[Tensor, Tensor]:
        drawn = _drawn(rank)
        return torch.randn(rows, hidden, generator=drawn), torch.randn(rows, hidden, generator=drawn)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).sum(dim=1).mean()

    return Workload(
        model=_seeded(lambda: Layers(hidden, layers)),
        batch=batch,
        train=lambda model, x, target: loss(model(x), target),
        parts=lambda model: list(model.layers),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        blocks=lambda model: model.layers,
    )


class Digits(nn.Module):
    """The network of examples/digits.py."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(self.block(1, 32), self.block(32, 32), nn.MaxPool2d(2), self.block(32, 64))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))

    @staticmethod
    def block(channels_in: int, channels_out: int) -> nn.Module:
        convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.features(images))  # type: ignore[no-any-return]


def _images(rows: int, channels: int, size: int, classes: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(rank: int) -> tuple[Tensor, Tensor]:
        drawn = _drawn(rank)
        images = torch.randn(rows, channels, size, size, generator=drawn)
        return images, torch.randint(classes, (rows,), generator=drawn)

    return batch


def digits(small: bool) -> Workload:
    """examples/digits.py: 64 images in a step."""
    return Workload(
        model=_seeded(Digits),
        batch=_images(8 if small else 32, 1, 8, 10),
        train=lambda model, images, labels: cross_entropy(model(images), labels),
        parts=lambda model: [*model.features, model.classifier],
        loss=cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        blocks=lambda model: [each for each in model.features if isinstance(each, nn.Sequential)],
    )


class Embedding(nn.Module):
    """The input of GPT-2."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe = model.transformer.wte, model.transformer.wpe

    def forward(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))  # type: ignore[no-any-return]


def _gpt2(sizes: GptSizes) -> Workload:
    def batch(rank: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(sizes.words, (sizes.rows, sizes.length), generator=_drawn(rank))
        return tokens, tokens

    def parts(model: Any) -> list[nn.Module]:
        return [Embedding(model), *model.transformer.h, nn.Sequential(model.transformer.ln_f, model.lm_head)]

    return Workload(
        model=lambda: gpt2(sizes),
        batch=batch,
        train=lambda model, tokens, labels: model(input_ids=tokens, labels=labels)["loss"],
        parts=parts,
        loss=lambda logits, tokens: cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()),
        optimizer=_adamw,
        blocks=lambda model: model.transformer.h,
        tied=lambda model: model.lm_head.weight,
    )


def gpt(small: bool) -> Workload:
    """GPT-2 of transformers with 6 layers."""
    return _gpt2(GptSizes(2, 32, 128, 16, 4) if small else GptSizes())


def head(small: bool) -> Workload:
    """GPT-2 of transformers with 2 layers and the published vocabulary: most of the work is in the head."""
    return _gpt2(GptSizes(2, 32, 1024, 16, 4) if small else GptSizes(layers=2, words=50257, length=64, rows=4))


def resnet(small: bool) -> Workload:
    """ResNet-18 of transformers, images of 32 x 32 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    made: Any = ResNetConfig  # whose arguments mypy knows only in part
    widths, depths = ([8, 16], [1, 1]) if small else ([64, 128, 256, 512], [2, 2, 2, 2])
    config = made(
        embedding_size=widths[0], hidden_sizes=widths, depths=depths, layer_type="basic", num_labels=10,
        problem_type="single_label_classification",
    )  # fmt: skip

    def layers(model: Any) -> list[nn.Module]:
        return [layer for stage in model.resnet.encoder.stages for layer in stage.layers]

    def parts(model: Any) -> list[nn.Module]:
        return [model.resnet.embedder, *layers(model), nn.Sequential(model.resnet.pooler, model.classifier)]

    return Workload(
        model=_seeded(lambda: ResNetForImageClassification(config)),
        batch=_images(4 if small else 16, 3, 32, 10),
        train=lambda model, images, labels: model(pixel_values=images, labels=labels)["loss"],
        parts=parts,
        loss=cross_entropy,
        optimizer=_adamw,
        blocks=layers,
    )


def _convolutions(channels_in: int, channels_out: int) -> nn.Sequential:
    def one(channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, channels_out, 3, padding=1), nn.GroupNorm(4, channels_out), nn.SiLU()]

    return nn.Sequential(*one(channels_in), *one(channels_out))


class Down(nn.Module):
    """Halves the image; keeps what it had before for the way up."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.body = _convolutions(channels_in, channels_out)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """`values`: what earlier ones kept, and the image."""
        *kept, x = values
        x = self.body(x)
        return (*kept, x, nn.functional.max_pool2d(x, 2))


class Middle(nn.Module):
    """The part without a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = _convolutions(channels, channels)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        *kept, x = values
        return (*kept, self.body(x))


class Up(nn.Module):
    """Doubles the image, and joins it with what the Down of its size kept."""

    def __init__(self, channels_in: int, channels_kept: int, channels_out: int) -> None:
        super().__init__()
        self.body = _convolutions(channels_in + channels_kept, channels_out)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        *kept, skip, x = values
        return (*kept, self.body(torch.cat([skip, nn.functional.interpolate(x, scale_factor=2)], dim=1)))


class UNet(nn.Module):
    """Predicts an image from an image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [
                Down(3, width), Down(width, 2 * width), Middle(2 * width),
                Up(2 * width, 2 * width, width), Up(width, width, width), nn.Conv2d(width, 3, 1),
            ]
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        values: Any = (x,)
        for part in self.parts:
            values = part(*values)
        return values  # type: ignore[no-any-return]


def unet(small: bool) -> Workload:
    """A U-Net with two skip connections; stages hand on what a later one needs."""
    rows, width, size = (4, 8, 8) if small else (8, 32, 32)

    def batch(rank: int) -> tuple[Tensor, Tensor]:
        drawn = _drawn(rank)
        return torch.randn(rows, 3, size, size, generator=drawn), torch.randn(rows, 3, size, size, generator=drawn)

    return Workload(
        model=_seeded(lambda: UNet(width)),
        batch=batch,
        train=lambda model, x, target: nn.functional.mse_loss(model(x), target),
        parts=lambda model: list(model.parts),
        loss=nn.functional.mse_loss,
        optimizer=_adamw,
        blocks=lambda model: model.parts,
    )


WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "tutorial": tutorial, "digits": digits, "gpt2": gpt, "resnet": resnet, "head": head, "unet": unet,
}  # fmt: skip
