"""The models of the zoo: small, deterministic, each with one trait that a plan can get wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 16
CLASSES = 7
TOKENS = 24
SEQUENCE = 6


class Tutorial(nn.Module):
    """The tutorial's net: linear layers in a row."""

    def __init__(self, layers: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class InsideLoss(nn.Module):
    """A net that computes its loss itself; `reduction` as in mse_loss."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y, reduction=self.reduction)


class Skip(nn.Module):
    """Values used several stages after the one that makes them, also by two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        second = torch.tanh(self.layers[1](first))
        hidden = second
        for layer in self.layers[2:6]:
            hidden = torch.tanh(layer(hidden))
        hidden = torch.tanh(self.layers[6](hidden + first))
        return self.layers[7](hidden * second) + x


class Tied(nn.Module):
    """First and last layer share their weight; the third layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.shared(x))
        x = torch.tanh(self.second(x))
        x = torch.tanh(self.shared(x))
        return self.last(x)


class ConvNorm(nn.Module):
    """Convolutions with BatchNorm: rows depend on each other, buffers change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(6)
        self.conv3 = nn.Conv2d(6, 6, 3)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(image)))
        x = x + F.relu(self.norm2(self.conv2(x)))
        x = F.relu(self.conv3(x))
        return self.head(x.mean(dim=(2, 3)))


class ConvNormLoss(ConvNorm):
    """The same with a mean loss inside."""

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(super().forward(image), label)


class ConvMean(nn.Module):
    """Convolutions without BatchNorm, straight and transposed, and a mean loss inside: rows are independent."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.conv2 = nn.Conv2d(6, 6, 3, stride=2, groups=2, bias=False)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(image)))
        x = torch.tanh(self.up(torch.tanh(self.conv2(x))))
        return F.cross_entropy(self.head(x.mean(dim=(2, 3))), label)


class Recurrent(nn.Module):
    """LSTMs: ops that give tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.lstm1 = nn.LSTM(WIDTH, 12, batch_first=True)
        self.lstm2 = nn.LSTM(12, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x, (hidden, _) = self.lstm1(torch.tanh(self.enter(self.embed(tokens))))
        x, _ = self.lstm2(x)
        return self.head(x[:, -1] + hidden[-1])


class Nested(nn.Module):
    """Keyword arguments, arguments that are None or containers, and nested outputs with None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(
        self, x: Tensor, *, scale: Tensor, absent: Tensor | None = None, extra: dict[str, Tensor] | None = None
    ) -> dict[str, Any]:
        early = torch.tanh(self.layers[0](x)) * scale.unsqueeze(1)
        middle = torch.tanh(self.layers[2](torch.tanh(self.layers[1](early))))
        if extra is not None:
            middle = middle + extra["bias"]
        if absent is not None:
            middle = middle * absent
        late = self.layers[5](torch.tanh(self.layers[4](torch.tanh(self.layers[3](middle)))))
        return {"pair": (early, late), "inner": {"norm": late.pow(2).sum(dim=1), "nothing": None}, "list": [middle]}


class Auxiliary(nn.Module):
    """Outputs of which a loss uses one: others are early, detached, whole numbers, or simply not wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.side = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        hidden = early
        for layer in self.layers[2:]:
            hidden = torch.tanh(layer(hidden))
        return {"early": early.detach(), "logits": hidden, "best": hidden.argmax(dim=1), "side": self.side(early)}


class Counter(nn.Module):
    """A buffer of the user's that counts training calls and takes part in the result."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("constant", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        for layer in self.layers[:3]:
            x = torch.tanh(layer(x))
        x = x * (1.0 + 0.1 * self.calls) * self.constant
        for layer in self.layers[3:]:
            x = torch.tanh(layer(x))
        return x


class LateReader(nn.Module):
    """A buffer that the first op writes in training and the last op reads, in training and in evaluation."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            x = x * self.calls.clone()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * (1.0 + 0.1 * self.calls)


class Running(nn.Module):
    """A running mean kept by hand: what goes into the buffer depends on the whole mini-batch."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(dim=0), alpha=0.1)
        x = torch.tanh(self.layers[2](x - self.mean.clone()))
        return self.layers[4](torch.tanh(self.layers[3](x)))


class _Tripled(torch.autograd.Function):
    """Has a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class _Choosing(nn.Module):
    """Goes the way that its input says, and counts how often it went which."""

    ways: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("ways", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        way = int(x.sum() > 0)
        if self.training:
            self.ways[way] += 1
        remembered, _ = self.memory(torch.stack([x, -x], 1))
        layer, other = (self.one, self.two) if way else (self.two, self.one)
        made = checkpoint(layer, x, use_reentrant=True) if torch.is_grad_enabled() else layer(x)
        return x + torch.tanh(made) + 0.1 * other(x) + remembered[:, 1]


class _Tripling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Tripled.apply(x)


class Opaque(nn.Module):
    """Submodules that no graph can show, between layers that one can."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.choosing, self.tripling = _Choosing(), _Tripling()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[1](torch.tanh(self.layers[0](x))))
        x = self.tripling(self.choosing(x))
        return self.layers[3](torch.tanh(self.layers[2](x)))


class Untraceable(nn.Module):
    """Nothing of it can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) if float(x.detach().sum()) > 0 else layer(x)
        return x


class Frozen(nn.Module):
    """Parameters that do not train, before, between and beside those that do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(7)])
        for index in (0, 3):
            self.layers[index].requires_grad_(False)
        self.layers[5].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class FineTuned(nn.Module):
    """Nothing trains in the first half: its stages have no trainable parameter and get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])
        for layer in self.layers[:5]:
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Unused(nn.Module):
    """A parameter that nothing reads and one whose result reaches no output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.never = nn.Parameter(torch.ones(3))
        self.vain = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.vain(x)
        return x


class InPlace(nn.Module):
    """In-place ops on values and on views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.layers[0](x))
        x = self.layers[1](x)
        x[:, :4].add_(1.0)
        x = torch.tanh_(self.layers[2](x))
        x = self.layers[3](x)
        x.view(-1, 4, WIDTH // 4).transpose(1, 2).mul_(0.5)
        x = self.layers[4](x).relu_()
        return self.layers[5](x)


class Attention(nn.Module):
    """Multi-head attention with residuals and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for attention, norm in zip(self.attention, self.norms, strict=True):
            mixed, _ = attention(x, x, x, need_weights=False)
            x = norm(x + mixed)
        return self.head(x)


class Regularised(nn.Module):
    """A mean of means plus a term that reads every parameter again, far from where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        error = (x - y).pow(2).mean(dim=1).mean()
        for layer in self.layers:
            error = error + 0.01 * layer.weight.pow(2).sum()
        return error


class Filled(nn.Module):
    """Fills a tensor in place and reads it several layers later; one branch is read for its shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        half = WIDTH // 2
        swapped = torch.zeros(x.shape[0], WIDTH, dtype=x.dtype)
        swapped[:, :half] = x[:, half:]
        swapped[:, half:] = x[:, :half]
        x = torch.tanh(self.layers[1](swapped))
        unread = self.layers[2](x)
        x = torch.tanh(self.layers[3](x)) + torch.ones_like(unread)
        return self.layers[4](x) + swapped


class Spectral(nn.Module):
    """Spectrally normalised layers: buffers written without gradients by what reads the weights."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.layers = nn.ModuleList([nn.utils.parametrizations.spectral_norm(layer) for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Masked(nn.Module):
    """Token classification whose mean loss leaves padded labels out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def _causal_loss(logits: Tensor, labels: Tensor, **_: object) -> Tensor:
    """transformers' causal loss, without its rounding of the logits to float32."""
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)


def gpt2(attention: str = "sdpa") -> nn.Module:
    """A tiny GPT-2 with tied embeddings and without dropout, its loss in the model's own precision."""
    import transformers  # takes a second, and only some cases need it

    config = transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=SEQUENCE,
        n_embd=32,
        n_layer=3,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_function = _causal_loss
    return model
