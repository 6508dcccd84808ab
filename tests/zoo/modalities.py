"""Models of images with text, of sound, and of time series."""

from __future__ import annotations

from typing import Any

import torch

from zoo import batches
from zoo.batches import CLASSES, IMAGE, TIME, TOKENS
from zoo.entry import Entry, hugging_face

_TEXT: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": TIME, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_IMAGE: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": IMAGE,
    "patch_size": 4,
}  # fmt: skip

PAIRS = tuple(
    Entry(name=name, family="image and text", build=build, batch=batch)
    for name, build, batch in (
        ("clip", hugging_face("CLIPModel", "CLIPConfig", text_config=_TEXT, vision_config=_IMAGE, projection_dim=8),
         lambda rows: batches.image_and_text(rows, return_loss=True)),
        ("siglip", hugging_face("SiglipModel", "SiglipConfig", text_config=_TEXT, vision_config=_IMAGE),
         lambda rows: batches.image_and_text(rows, return_loss=True)),
        ("blip", hugging_face("BlipForConditionalGeneration", "BlipConfig", projection_dim=8, image_text_hidden_size=16,
                              text_config={**_TEXT, "encoder_hidden_size": 16, "projection_dim": 8, "sep_token_id": 2},
                              vision_config={**_IMAGE, "projection_dim": 8}),
         lambda rows: batches.causal(rows) | {"pixel_values": batches.image(rows)}),
    )
)  # fmt: skip

_WAVES: dict[str, Any] = {
    "vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8,
}  # fmt: skip


def _transcript(rows: int) -> dict[str, Any]:
    """Sound and what is said in it."""
    labels = torch.randint(3, 12, (rows, 6))
    return {"input_values": batches.sound(rows), "labels": labels.masked_fill(batches.mask(rows, 6) == 0, -100)}


def _spoken(rows: int) -> dict[str, Any]:
    """A spectrogram and what is said in it."""
    return {"input_features": torch.randn(rows, 8, 40), "labels": batches.translation(rows)["labels"]}


SOUND = (
    Entry(
        name="whisper", family="sound", batch=_spoken,
        build=hugging_face(
            "WhisperForConditionalGeneration", "WhisperConfig", vocab_size=TOKENS, num_mel_bins=8, d_model=16,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=20, max_target_positions=16,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
        ),
    ),
    Entry(
        name="wav2vec2", family="sound", batch=_transcript, random=True,
        build=hugging_face("Wav2Vec2ForCTC", "Wav2Vec2Config", ctc_zero_infinity=True, **_WAVES),
    ),
    Entry(
        name="hubert", family="sound", random=True,
        batch=lambda rows: {"input_values": batches.sound(rows), "labels": batches.classes(rows)},
        build=hugging_face("HubertForSequenceClassification", "HubertConfig", num_labels=CLASSES, **_WAVES),
    ),
)  # fmt: skip

_SERIES: dict[str, Any] = {
    "prediction_length": 4, "context_length": 6, "num_time_features": 1, "d_model": 16, "dropout": 0.0,
    "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip

SERIES = (
    Entry(
        name="time series transformer", family="time series", random=True,
        batch=lambda rows: batches.series(rows, 13, 4),
        build=hugging_face("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", **_SERIES),
    ),
    Entry(
        name="informer", family="time series", random=True, batch=lambda rows: batches.series(rows, 13, 4),
        build=hugging_face("InformerForPrediction", "InformerConfig", **_SERIES),
    ),
    Entry(
        name="patchtst", family="time series",
        batch=lambda rows: {"past_values": torch.randn(rows, 12, 2), "future_values": torch.randn(rows, 4, 2)},
        build=hugging_face(
            "PatchTSTForPrediction", "PatchTSTConfig", num_input_channels=2, context_length=12, patch_length=4,
            patch_stride=4, prediction_length=4, num_hidden_layers=2, d_model=16, num_attention_heads=2, ffn_dim=32,
            attention_dropout=0.0, ff_dropout=0.0, head_dropout=0.0,
        ),
    ),
)  # fmt: skip
