"""Models of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from zoo import batches
from zoo.batches import CLASSES, IMAGE
from zoo.entry import Batch, Entry, hugging_face

PATCHES: dict[str, Any] = {
    "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32,
    "image_size": IMAGE, "patch_size": 4, "num_labels": CLASSES,
}  # fmt: skip
RESNET: dict[str, Any] = {
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 16, 16],
    "depths": [1, 2, 1, 1],
    "layer_type": "basic",
}


def _classifier(
    name: str, prefix: str, *, batch: Callable[[int], Batch] = batches.image_class, **settings: Any
) -> Entry:
    build = hugging_face(f"{prefix}ForImageClassification", f"{prefix}Config", **settings)
    return Entry(name=name, family="vision", build=build, batch=batch)


_DETR_BACKBONE: dict[str, Any] = {**RESNET, "out_features": ["stage4"]}


def _detr() -> nn.Module:
    import transformers

    settings: dict[str, Any] = {
        "backbone_config": transformers.ResNetConfig(**_DETR_BACKBONE), "num_queries": 6,
        "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0,
        "num_labels": CLASSES,
    }  # fmt: skip
    return hugging_face("DetrForObjectDetection", "DetrConfig", **settings)()


VISION = (
    _classifier("vit", "ViT", **PATCHES),
    _classifier("deit", "DeiT", **PATCHES),
    _classifier("beit", "Beit", drop_path_rate=0.0, use_relative_position_bias=True, **PATCHES),
    _classifier("dinov2", "Dinov2", **PATCHES),
    _classifier(
        "swin",
        "Swin",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.0,
        num_labels=CLASSES,
        batch=lambda rows: batches.image_class(rows, 32),
    ),
    _classifier(
        "convnext",
        "ConvNext",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 2, 1],
        num_labels=CLASSES,
        batch=lambda rows: batches.image_class(rows, 32),
    ),
    _classifier("resnet", "ResNet", num_labels=CLASSES, batch=lambda rows: batches.image_class(rows, 64), **RESNET),
    _classifier(
        "regnet",
        "RegNet",
        embedding_size=8,
        hidden_sizes=[8, 16, 16, 16],
        depths=[1, 2, 1, 1],
        groups_width=8,
        num_labels=CLASSES,
        batch=lambda rows: batches.image_class(rows, 64),
    ),
    _classifier(
        "mobilenet-v2",
        "MobileNetV2",
        depth_multiplier=0.25,
        classifier_dropout_prob=0.0,
        num_labels=CLASSES,
        batch=lambda rows: batches.image_class(rows, 64),
    ),
    Entry(
        name="segformer",
        family="vision",
        batch=batches.pixel_classes,
        build=hugging_face(
            "SegformerForSemanticSegmentation",
            "SegformerConfig",
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 8, 16, 16],
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=16,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
            num_labels=CLASSES,
        ),
    ),
    Entry(name="detr", family="vision", build=_detr, batch=lambda rows: {"pixel_values": batches.image(rows, 64)}),
)
