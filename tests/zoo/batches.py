"""The inputs of the zoo's models: tokens with padding, images, sound, time series."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS = 40
"""Vocabulary; the first three tokens are special: padding, begin, end."""
TIME = 8
CLASSES = 5
IMAGE = 16
WIDTH = 16
"""Features of a row, or of a step of it."""


def tokens(rows: int, time: int = TIME) -> Tensor:
    return torch.randint(3, TOKENS, (rows, time))


def mask(rows: int, time: int = TIME) -> Tensor:
    """1 for tokens, 0 for padding at the end; at least three tokens in each row."""
    return (torch.arange(time) < torch.randint(3, time + 1, (rows, 1))).long()


def classes(rows: int) -> Tensor:
    return torch.randint(0, CLASSES, (rows,))


def causal(rows: int, time: int = TIME) -> dict[str, Tensor]:
    """A text to be continued; padding is no label."""
    text, real = tokens(rows, time), mask(rows, time)
    return {"input_ids": text, "attention_mask": real, "labels": text.masked_fill(real == 0, -100)}


def unpadded(rows: int) -> dict[str, Tensor]:
    """A text to be continued, all of one length."""
    text = tokens(rows)
    return {"input_ids": text, "labels": text}


def masked(rows: int, time: int = TIME) -> dict[str, Tensor]:
    """A text with gaps: every third token is to be found."""
    text, real = tokens(rows, time), mask(rows, time)
    gaps = (torch.arange(time) % 3 == 1) & (real == 1)
    return {
        "input_ids": text.masked_fill(gaps, 3),
        "attention_mask": real,
        "labels": text.masked_fill(~gaps, -100),
    }


def text_class(rows: int, time: int = TIME) -> dict[str, Tensor]:
    """A text with one class."""
    return {"input_ids": tokens(rows, time), "attention_mask": mask(rows, time), "labels": classes(rows)}


def token_classes(rows: int, time: int = TIME) -> dict[str, Tensor]:
    """A text with a class for each token."""
    real = mask(rows, time)
    labels = torch.randint(0, CLASSES, (rows, time)).masked_fill(real == 0, -100)
    return {"input_ids": tokens(rows, time), "attention_mask": real, "labels": labels}


def answer(rows: int) -> dict[str, Tensor]:
    """A text, and the first and last token of the answer in it."""
    first = torch.randint(0, TIME // 2, (rows,))
    return {
        "input_ids": tokens(rows),
        "attention_mask": mask(rows),
        "start_positions": first,
        "end_positions": first + torch.randint(0, TIME // 2, (rows,)),
    }


def translation(rows: int, time: int = TIME) -> dict[str, Tensor]:
    """A text and another, shorter one."""
    real = mask(rows, TIME - 2)
    labels = tokens(rows, TIME - 2).masked_fill(real == 0, -100)
    return {"input_ids": tokens(rows, time), "attention_mask": mask(rows, time), "labels": labels}


def image(rows: int, size: int = IMAGE) -> Tensor:
    return torch.randn(rows, 3, size, size)


def image_class(rows: int, size: int = IMAGE) -> dict[str, Tensor]:
    """An image with one class."""
    return {"pixel_values": image(rows, size), "labels": classes(rows)}


def pixel_classes(rows: int, size: int = 32) -> dict[str, Tensor]:
    """An image with a class for each pixel; 255 is no class."""
    labels = torch.randint(0, CLASSES, (rows, size, size))
    return {"pixel_values": image(rows, size), "labels": labels.masked_fill(torch.rand(rows, size, size) < 0.1, 255)}


def image_and_text(rows: int, **more: Any) -> dict[str, Any]:
    """Images with their descriptions."""
    return {"input_ids": tokens(rows), "attention_mask": mask(rows), "pixel_values": image(rows), **more}


def sound(rows: int, samples: int = 400) -> Tensor:
    return torch.randn(rows, samples)


def series(rows: int, past: int, future: int) -> dict[str, Tensor]:
    """A series of positive numbers with one feature of its times; some of the past was not observed."""
    return {
        "past_values": torch.rand(rows, past) + 0.5,
        "past_time_features": torch.randn(rows, past, 1),
        "past_observed_mask": (torch.rand(rows, past) < 0.9).to(torch.get_default_dtype()),
        "future_values": torch.rand(rows, future) + 0.5,
        "future_time_features": torch.randn(rows, future, 1),
    }


def features(rows: int) -> dict[str, Tensor]:
    """Features and a class."""
    return {"x": torch.randn(rows, WIDTH), "target": classes(rows)}


def steps(rows: int) -> dict[str, Tensor]:
    """Features at each time, and a class."""
    return {"x": torch.randn(rows, TIME, WIDTH), "target": classes(rows)}


def text(rows: int) -> dict[str, Tensor]:
    """A text and a class."""
    return {"text": tokens(rows), "target": classes(rows)}
