"""Error messages for unsupported argument types, with advice on what to pass instead."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn


def refusal(name: str, value: Any) -> str:
    """Message that explains why an argument is not supported and what to pass instead."""
    if isinstance(value, torch.Tensor):
        kind = "nested" if value.is_nested else f"sparse ({value.layout})"
        return (
            f"{name} of the model is a {kind} tensor, whose samples cannot be told apart and sent to ranks; pass "
            f"{'a padded tensor and a mask' if value.is_nested else 'a dense one, x.to_dense()'}"
        )
    return f"{name} of the model is a {type(value).__module__}.{type(value).__qualname__}; {_advice(value)}"


def _advice(value: Any) -> str:
    if type(value).__module__ == "numpy":
        return "make a tensor of it, torch.as_tensor(x), or x.item() where it is a single number"
    if isinstance(value, nn.Module):
        return "make it an attribute of the model, so that its parameters are the model's"
    if type(value).__module__.startswith("transformers.") and type(value).__qualname__.endswith("Cache"):
        return "ranks do not pass a cache of keys and values on; generate without one: generate(.., use_cache=False)"
    if isinstance(value, Iterator):
        return "it can be read only once; pass a list of what it gives"
    if isinstance(value, Set):
        return "it has no order; pass a sorted list"
    if isinstance(value, enum.Enum):
        return "pass its value"
    if isinstance(value, Mapping):
        return "pass a dict of it"
    if isinstance(value, range):
        return "pass a tuple of it"
    if isinstance(value, Callable):  # type: ignore[arg-type]
        return "make it an attribute of the model"
    return (
        "the model takes tensors, None, numbers, strings and containers of them: lists, tuples, dicts, dataclasses, "
        "and types that are registered with torch.utils._pytree.register_pytree_node"
    )
