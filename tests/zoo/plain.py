"""Models written with torch alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, relu, triplet_margin_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from zoo import batches
from zoo.batches import CLASSES, TIME, TOKENS, WIDTH
from zoo.entry import Entry


def residual(width: int = WIDTH) -> nn.Sequential:
    """A small block."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class LastState(nn.Module):
    """LSTM in two layers; the last step decides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, text: Tensor, target: Tensor) -> dict[str, Tensor]:
        states, _ = self.lstm(self.embed(text))
        logits = self.head(states[:, -1])
        return {"loss": cross_entropy(logits, target), "logits": logits}


class BothWays(nn.Module):
    """GRU in both directions; all steps decide."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(4 * WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        states, last = self.gru(x)
        logits = self.head(torch.cat([states.mean(1), last[-1], last[-2]], 1))
        return cross_entropy(logits, target), logits


class TimeFirst(nn.Module):
    """LSTM that has the time in front, in a model that has the batch in front."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        states, _ = self.lstm(x.transpose(0, 1))
        logits = self.head(states).transpose(0, 1)
        return cross_entropy(logits.mean(1), target), logits


class Packed(nn.Module):
    """LSTM over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.body = nn.Sequential(*(residual() for _ in range(6)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, text: Tensor, lengths: Tensor, target: Tensor) -> dict[str, Tensor]:
        packed = pack_padded_sequence(self.embed(text), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=text.shape[1])
        logits = self.head(self.body(states.sum(1) / lengths[:, None]))
        return {"loss": cross_entropy(logits, target), "logits": logits}


class Seq2Seq(nn.Module):
    """nn.Transformer from tokens to tokens, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, source: Tensor, padding: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, dtype=torch.bool)
        hidden = self.transformer(
            self.embed(source), self.embed(target[:, :-1]), tgt_mask=later, src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )  # fmt: skip
        logits = self.head(hidden)
        return cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten()), logits


class CrossAttention(nn.Module):
    """nn.MultiheadAttention between two sequences; its weights are an output."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.other = nn.MultiheadAttention(WIDTH, 2, kdim=8, vdim=8, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.own(x, x, x, need_weights=False)[0]
        found, weights = self.other(self.norm(x), memory, memory)
        return x + found, weights


class UNet(nn.Module):
    """Down and up again; what was seen on the way down is joined in on the way up."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 8, 12, 16]
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairwise(sizes))
        self.lift = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in ((8, 12), (12, 16)))
        self.up = nn.ModuleList(self._block(2 * a, a) for a in (8, 12))
        self.head = nn.Conv2d(8, 1, 1)

    @staticmethod
    def _block(inside: int, outside: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        seen: list[Tensor] = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else nn.functional.max_pool2d(x, 2))
            seen.append(x)
        for number in (1, 0):
            x = self.up[number](torch.cat([seen[number], self.lift[number](x)], 1))
        logits = self.head(x)
        return {"loss": binary_cross_entropy_with_logits(logits, target), "logits": logits}


class Siamese(nn.Module):
    """One network for three inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(residual(), residual(), nn.Linear(WIDTH, 8))

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        return triplet_margin_loss(self.branch(anchor), self.branch(near), self.branch(far), margin=2.0)


class Nested(nn.Module):
    """Takes containers in containers, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.joint = nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: dict[str, Any], scale: float, mode: str, mask: Tensor | None = None) -> dict[str, Any]:
        first, second = features["dense"]
        text = self.embed(features["text"]["tokens"]).mean(1)
        joined = torch.cat([first, second * scale, text if mask is None else text * mask], 1)
        hidden = torch.tanh(self.joint(joined)) if mode == "tanh" else relu(self.joint(joined))
        logits = self.head(hidden)
        return {"loss": cross_entropy(logits, features["target"]), "rest": [logits, {"hidden": hidden}], "none": None}


def _nested(rows: int) -> dict[str, Any]:
    return {
        "features": {
            "dense": (torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)),
            "text": {"tokens": batches.tokens(rows)},
            "target": batches.classes(rows),
        },
        "scale": 0.5,
        "mode": "tanh",
        "mask": None,
    }


class ScatteredExperts(nn.Module):
    """Tokens choose two experts; their weights are scattered into a table over all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(4, 24, WIDTH) / 5)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x)
        best, choice = scores.topk(2, -1)
        table = torch.zeros_like(scores).scatter(-1, choice, best.softmax(-1))
        hidden = relu(torch.einsum("btd,edf->btef", x, self.up))
        mixed = torch.einsum("btef,efd,bte->btd", hidden, self.down, table)
        load = table.mean((0, 1))
        return cross_entropy(self.head(mixed.mean(1)), target) + 0.01 * (load * load).sum(), table


class EinsumAttention(nn.Module):
    """Attention spelled out, with relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.relative = nn.Parameter(torch.randn(2, 2 * TIME - 1) / 4)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        rows, time, width = x.shape
        q, k, v = self.project(x).view(rows, time, 3, 2, width // 2).unbind(2)
        place = torch.arange(time)
        bias = self.relative[:, place[:, None] - place[None, :] + time - 1]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (width // 2) ** 0.5 + bias
        later = torch.triu(torch.ones(time, time, dtype=torch.bool), 1)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(later, float("-inf")).softmax(-1), v)
        return mse_loss(self.out(mixed.reshape(rows, time, width)), target)


class Tied(nn.Module):
    """Its first and its last layer are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.body = nn.Sequential(residual(), residual(), residual())
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(self.embed(text[:, :-1])))
        return cross_entropy(logits.transpose(1, 2), text[:, 1:]), logits


class Generator(nn.Module):
    """Images out of noise that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(WIDTH, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise: Tensor) -> Tensor:
        image: Tensor = self.layers(noise[:, :, None, None])
        return image


class Autoencoder(nn.Module):
    """Variational, with the noise given; the losses are sums."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.spread = nn.Sequential(residual(), nn.Linear(WIDTH, 8)), nn.Softplus()
        self.decoder = nn.Sequential(nn.Linear(4, WIDTH), residual())

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, spread = self.encoder(x).chunk(2, 1)
        deviation = self.spread(spread)
        found = self.decoder(mean + deviation * noise)
        distance = 0.5 * (mean.pow(2) + deviation.pow(2) - 1 - 2 * deviation.log()).sum()
        return {"loss": mse_loss(found, x, reduction="sum") + distance, "found": found, "mean": mean}


class GraphNet(nn.Module):
    """Nodes are the rows: they send along edges, and add up what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.updates = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, neighbour: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        for message, update in zip(self.messages, self.updates, strict=True):
            sent = relu(message(x))
            got = torch.zeros_like(x).index_add(0, neighbour, sent)
            x = update(got, x)
        logits = self.head(x)
        return cross_entropy(logits, target), logits


def _translated(rows: int) -> dict[str, Any]:
    return {"source": batches.tokens(rows), "padding": batches.mask(rows) == 0, "target": batches.tokens(rows, 6)}


def _lengths(rows: int) -> dict[str, Any]:
    return {"text": batches.tokens(rows), "lengths": batches.mask(rows).sum(1), "target": batches.classes(rows)}


PLAIN = tuple(
    Entry(name=name, family="torch", build=build, batch=batch)
    for name, build, batch in (
        ("lstm", LastState, batches.text),
        ("gru, both ways", BothWays, batches.steps),
        ("lstm, time first", TimeFirst, batches.steps),
        ("lstm, packed", Packed, _lengths),
        ("nn.Transformer", Seq2Seq, _translated),
        ("nn.MultiheadAttention", CrossAttention,
         lambda rows: {"x": torch.randn(rows, TIME, WIDTH), "memory": torch.randn(rows, 6, 8)}),
        ("u-net", UNet, lambda rows: {"x": batches.image(rows), "target": torch.rand(rows, 1, 16, 16)}),
        ("siamese", Siamese, lambda rows: {name: torch.randn(rows, WIDTH) for name in ("anchor", "near", "far")}),
        ("nested inputs", Nested, _nested),
        ("experts, scattered", ScatteredExperts, batches.steps),
        ("einsum attention", EinsumAttention,
         lambda rows: {"x": torch.randn(rows, TIME, WIDTH), "target": torch.randn(rows, TIME, WIDTH)}),
        ("tied", Tied, lambda rows: {"text": batches.tokens(rows)}),
        ("generator", Generator, lambda rows: {"noise": torch.randn(rows, WIDTH)}),
        ("autoencoder", Autoencoder,
         lambda rows: {"x": torch.randn(rows, WIDTH), "noise": torch.randn(rows, 4)}),
        ("graph network", GraphNet,
         lambda rows: batches.features(rows) | {"neighbour": torch.randint(0, rows, (rows,))}),
    )
)  # fmt: skip
