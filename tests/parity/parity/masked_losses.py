"""Models whose losses are means over the labels that count, or over pairs of samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parity.blocks import CLASSES, TOKENS, WIDTH


class Weighted(nn.Module):
    """Token classification: padded labels, class weights in a buffer, smoothed; and a mean over a mask, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.value = nn.Linear(WIDTH, 1)
        self.criterion = nn.CrossEntropyLoss(torch.linspace(0.3, 2.0, CLASSES), label_smoothing=0.1)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits, mask = self.head(x), labels != -100
        off = (self.value(x).squeeze(-1) - 1).pow(2)
        return self.criterion(logits.transpose(1, 2), labels) + (off * mask).sum() / mask.sum(), logits


class Contrastive(nn.Module):
    """Two views of each sample: each has to be nearer to its own than to all others of the mini-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.two = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        one, two = F.normalize(self.one(one), dim=1), F.normalize(self.two(two), dim=1)
        likeness = self.scale.exp() * one @ two.t()
        labels = torch.arange(len(one))
        return (F.cross_entropy(likeness, labels) + F.cross_entropy(likeness.t(), labels)) / 2


def t5() -> nn.Module:
    """A tiny T5 without dropout, in its own precision throughout: its norms round what they are given to float32."""
    import transformers  # takes a second, and only some cases need it

    config = transformers.T5Config(
        vocab_size=TOKENS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = transformers.T5ForConditionalGeneration(config)
    norms = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__ == "T5LayerNorm"
    ]
    assert len(norms) == 2 * 2 + 2 * 3 + 2
    for parent, name, child in norms:
        setattr(parent, name, nn.RMSNorm(16, eps=child.variance_epsilon))
    return model
