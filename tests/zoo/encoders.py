"""Models that read a whole text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zoo import batches
from zoo.batches import CLASSES, TOKENS
from zoo.entry import Batch, Entry, hugging_face

LAYERS: dict[str, Any] = {
    "vocab_size": TOKENS, "pad_token_id": 0, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16,
    "intermediate_size": 32, "max_position_embeddings": 24, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _encoder(
    name: str,
    prefix: str,
    task: str,
    batch: Callable[[int], Batch],
    *,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> Entry:
    build = hugging_face(f"{prefix}{task}", f"{prefix}Config", **settings)
    return Entry(name=name, family="encoder", build=build, batch=batch, dtype=dtype)


ENCODERS = (
    _encoder("bert", "Bert", "ForMaskedLM", batches.masked, **LAYERS),
    _encoder(
        "bert, pairs",
        "Bert",
        "ForPreTraining",
        lambda rows: (
            batches.masked(rows)
            | {
                "token_type_ids": (batches.tokens(rows) > 20).long(),
                "next_sentence_label": batches.classes(rows) % 2,
            }
        ),
        **LAYERS,
    ),
    _encoder("roberta", "Roberta", "ForSequenceClassification", batches.text_class, num_labels=CLASSES, **LAYERS),
    _encoder("albert", "Albert", "ForMaskedLM", batches.masked, embedding_size=8, **LAYERS),
    _encoder(
        "distilbert",
        "DistilBert",
        "ForQuestionAnswering",
        batches.answer,
        vocab_size=TOKENS,
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=32,
        max_position_embeddings=24,
        dropout=0.0,
        attention_dropout=0.0,
        qa_dropout=0.0,
    ),
    _encoder(
        "electra",
        "Electra",
        "ForTokenClassification",
        batches.token_classes,
        embedding_size=8,
        num_labels=CLASSES,
        **LAYERS,
    ),
    _encoder(
        "deberta",
        "Deberta",
        "ForSequenceClassification",
        batches.text_class,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        type_vocab_size=0,
        num_labels=CLASSES,
        **LAYERS,
    ),
    _encoder(
        "deberta-v2",
        "DebertaV2",
        "ForMaskedLM",
        batches.masked,
        relative_attention=True,
        position_buckets=4,
        pos_att_type=["c2p", "p2c"],
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        **LAYERS,
    ),
    _encoder("mpnet", "MPNet", "ForMaskedLM", batches.masked, **LAYERS),
    _encoder(
        "xlm-roberta", "XLMRoberta", "ForTokenClassification", batches.token_classes, num_labels=CLASSES, **LAYERS
    ),
    _encoder(
        "xlnet",
        "XLNet",
        "LMHeadModel",
        batches.causal,
        vocab_size=TOKENS,
        d_model=16,
        n_layer=2,
        n_head=2,
        d_inner=32,
        dropout=0.0,
    ),
    # Of doubles, transformers' softmax in float32 makes NaN gradients where a query sees padding alone.
    _encoder(
        "longformer", "Longformer", "ForMaskedLM", batches.masked, dtype=torch.float32, attention_window=4, **LAYERS
    ),
    _encoder(
        "big bird",
        "BigBird",
        "ForMaskedLM",
        lambda rows: batches.masked(rows, 24),
        block_size=2,
        num_random_blocks=1,
        sep_token_id=2,
        **LAYERS,
    ),
    _encoder(
        "modernbert",
        "ModernBert",
        "ForMaskedLM",
        batches.masked,
        local_attention=4,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        **LAYERS,
    ),
)

_SIZES: dict[str, Any] = {
    "vocab_size": TOKENS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}  # fmt: skip
_T5: dict[str, Any] = {
    "vocab_size": TOKENS, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip


def _translator(
    name: str, model: str, config: str, batch: Callable[[int], Batch] = batches.translation, **settings: Any
) -> Entry:
    return Entry(name=name, family="encoder-decoder", build=hugging_face(model, config, **settings), batch=batch)


TRANSLATORS = (
    _translator("t5", "T5ForConditionalGeneration", "T5Config", **_T5),
    _translator("mt5", "MT5ForConditionalGeneration", "MT5Config", **_T5),
    _translator("longt5", "LongT5ForConditionalGeneration", "LongT5Config", local_radius=3, **_T5),
    _translator(
        "longt5, global",
        "LongT5ForConditionalGeneration",
        "LongT5Config",
        local_radius=3,
        encoder_attention_type="transient-global",
        global_block_size=4,
        **_T5,
    ),
    _translator("bart", "BartForConditionalGeneration", "BartConfig", **_SIZES),
    _translator("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", **_SIZES),
    _translator("mbart", "MBartForConditionalGeneration", "MBartConfig", **_SIZES),
    _translator("marian", "MarianMTModel", "MarianConfig", **_SIZES),
)
