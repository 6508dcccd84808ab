"""Language models that continue a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo import batches
from zoo.batches import TOKENS
from zoo.entry import Batch, Entry, hugging_face

SPECIAL: dict[str, Any] = {"vocab_size": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT: dict[str, Any] = {**SPECIAL, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16,
                       "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
LAYERS: dict[str, Any] = {**SPECIAL, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16,
                          "intermediate_size": 32, "max_position_embeddings": 16}  # fmt: skip
GROUPED: dict[str, Any] = {**LAYERS, "num_key_value_heads": 1}
HEADS: dict[str, Any] = {**GROUPED, "head_dim": 8}


def _decoder(
    name: str,
    prefix: str,
    *,
    model: str = "ForCausalLM",
    config: str = "Config",
    batch: Callable[[int], Batch] = batches.causal,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Entry:
    build = hugging_face(f"{prefix}{model}", f"{prefix}{config}", **settings)
    return Entry(name=name, family="decoder", build=build, batch=batch, dtype=dtype)


DECODERS = (
    _decoder("gpt2", "GPT2", model="LMHeadModel", **GPT),
    _decoder("gpt-j", "GPTJ", rotary_dim=4, **GPT),
    _decoder("gpt-neox", "GPTNeoX", hidden_dropout=0.0, attention_dropout=0.0, **LAYERS),
    _decoder("opt", "OPT", ffn_dim=32, word_embed_proj_dim=16, dropout=0.0, **LAYERS),
    _decoder("bloom", "Bloom", n_layer=2, n_head=2, hidden_size=16, **SPECIAL),
    _decoder("llama", "Llama", **GROUPED),
    _decoder("mistral", "Mistral", sliding_window=4, **GROUPED),
    _decoder("qwen2", "Qwen2", **GROUPED),
    _decoder("qwen3", "Qwen3", **HEADS),
    # In a window of 4 some queries see padding alone, of which transformers' softmax in float32 makes NaN of doubles.
    _decoder("gemma2", "Gemma2", sliding_window=6, query_pre_attn_scalar=8, **HEADS),
    _decoder("gemma3", "Gemma3", config="TextConfig", sliding_window=4, query_pre_attn_scalar=8, **HEADS),
    _decoder("phi", "Phi", **LAYERS),
    _decoder("phi3", "Phi3", **GROUPED),
    _decoder("falcon", "Falcon", **LAYERS),
    _decoder("falcon, alibi", "Falcon", alibi=True, **LAYERS),
    _decoder("stablelm", "StableLm", **GROUPED),
    _decoder("olmo2", "Olmo2", **GROUPED),
    # The default way to run experts is a kernel without doubles.
    _decoder("mixtral", "Mixtral", num_local_experts=4, dtype=torch.float32, **GROUPED),
    _decoder("mixtral, looped", "Mixtral", num_local_experts=4, experts_implementation="eager", **GROUPED),
    _decoder(
        "qwen2-moe",
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        experts_implementation="batched_mm",
        **GROUPED,
    ),
    _decoder(
        "olmoe",
        "Olmoe",
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        dtype=torch.float32,
        **GROUPED,
    ),
    _decoder("mamba", "Mamba", hidden_size=16, state_size=4, num_hidden_layers=2, **SPECIAL),
    _decoder("rwkv", "Rwkv", hidden_size=16, num_hidden_layers=2, context_length=16, batch=batches.unpadded, **SPECIAL),
)
