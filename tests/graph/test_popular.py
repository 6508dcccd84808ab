"""Popular architectures: their samples are independent, and pieces give the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pieces import assert_same, eager, graph_of, in_pieces
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROWS, TIME = 5, 8


def _ids() -> torch.Tensor:
    return torch.randint(1, 20, (ROWS, TIME))


def _labels(ids: torch.Tensor) -> torch.Tensor:
    return ids.masked_fill(torch.arange(TIME) >= torch.randint(2, TIME + 1, (ROWS, 1)), -100)


def _text() -> dict[str, Any]:
    ids = _ids()
    lengths = torch.randint(2, TIME + 1, (ROWS, 1))
    return {"input_ids": ids, "attention_mask": (torch.arange(TIME) < lengths).long(), "labels": _labels(ids)}


def _causal() -> dict[str, Any]:
    ids = _ids()
    return {"input_ids": ids, "labels": _labels(ids)}


def gpt2(attention: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=16, use_cache=False, attn_implementation=attention,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=8, intermediate_size=16, vocab_size=20,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=1, num_heads=2, d_model=8, d_kv=4, d_ff=16, vocab_size=20, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, hidden_size=8, intermediate_size=16,
        vocab_size=20, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=8, intermediate_size=16, image_size=8, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(ROWS, 3, 8, 8), "labels": torch.randint(0, 4, (ROWS,))}


def transformer() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )


def resnet() -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.na, self.nb = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu_(self.nb(self.b(torch.relu(self.na(self.a(x))))) + x)

    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), nn.MaxPool2d(2), Block(), *tail).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "gpt2 sdpa": (lambda: gpt2("sdpa"), _causal),
    "gpt2 eager": (lambda: gpt2("eager"), _text),
    "bert": (bert, _text),
    "t5": (t5, _text),
    "llama": (llama, _text),
    "vit": (vit, _images),
    "transformer": (transformer, lambda: {"src": torch.randn(ROWS, TIME, 8)}),
    "resnet, eval": (resnet, lambda: {"input": torch.randn(ROWS, 3, 8, 8)}),
}


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_samples_are_independent(name: str) -> None:
    torch.manual_seed(3)
    build, batch = MODELS[name]
    model, kwargs = build().double(), batch()
    graph = graph_of(model, **kwargs)
    assert graph.coupled is None
    tensors = [kwargs[key] for key in sorted(kwargs)]
    assert_same(in_pieces(graph, model, tensors, [2, 1, 2]), eager(graph, model, tensors))
