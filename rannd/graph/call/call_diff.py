"""Describe how the model calls of different ranks differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from rannd.graph.call.signature import Call, Mode, Signature, argument_name
from rannd.graph.call.unread import Unread

SAME_CALL = "all ranks have to make the same call"
SAME_SIZES = (
    "sizes other than the number of samples have to be the same on all ranks here, because the model takes other "
    "branches for them, holds for one number of samples, or has no samples to trace it with: pad to a common length"
)
OTHER_CUT = (
    "for these sizes the model's stages read other parameters or exchange other values, or an output that is summed "
    "over the ranks has another size: pad to a common length (where stages are the reason, partition_num=1 without "
    "ZeRO 2 and 3 does as well)"
)
LONGEST = 80
MODE = "mode"
STRUCTURE = "structure"


@dataclass(frozen=True)
class _Slot:
    """Placeholder for a pytree leaf, used to look up its path."""

    position: int


def of_call(call: Call, mode: Mode) -> dict[str, str]:
    """Map each argument name (nested ones included) to a description of what must be equal on all ranks."""
    words = {
        position: f"a tensor of {_dtype(tensor.dtype)} with {tensor.ndim} dimensions{_grad(tensor.requires_grad)}"
        for position, tensor in zip(call.positions, call.tensors, strict=True)
    }
    return _named(call.spec, {**words, **_constants(call.constants)}, mode)


def of_signature(signature: Signature) -> dict[str, str]:
    """Like `of_call`, for the signature of an existing graph, whose shapes are known."""
    words = {}
    for position, spec in zip(signature.positions, signature.tensors, strict=True):
        sizes = ", ".join([*(["B"] if spec.batch else []), *map(str, spec.shape)])
        words[position] = f"a tensor {_dtype(spec.dtype)}({sizes}){_grad(spec.requires_grad)}"
    found = _named(signature.spec, {**words, **_constants(signature.constants)}, signature.mode)
    if signature.fixed_rows is not None:
        found["the number of samples"] = str(signature.fixed_rows)
    return found


def difference(calls: Sequence[Mapping[str, str]]) -> str:
    """Describe which ranks differ from the majority, and in which arguments; '' if all calls are alike."""
    keys = [tuple(sorted(call.items())) for call in calls]
    counts = Counter(keys)
    common = max(counts.values())
    first = next(rank for rank, key in enumerate(keys) if counts[key] == common)
    usual = calls[first]
    lines = []
    for rank, call in enumerate(calls):
        if call != usual:
            lines += _told(rank, call, first, usual)
    shown = lines[:8] + ([f"and {len(lines) - 8} more"] if len(lines) > 8 else [])
    return "; ".join(shown)


def _told(rank: int, call: Mapping[str, str], first: int, usual: Mapping[str, str]) -> list[str]:
    lines = []
    for name in dict.fromkeys([*usual, *call]):
        here, there = call.get(name), usual.get(name)
        if here == there:
            continue
        if name == MODE:
            lines.append(f"rank {rank} calls the model {here}, rank {first} {there}")
        elif here is None:
            lines.append(f"rank {rank} does not pass {name}, rank {first} passes {there}")
        elif there is None:
            lines.append(f"rank {rank} passes {name} ({here}), rank {first} does not")
        else:
            lines.append(f"rank {rank} passes {here} as {name}, rank {first} {there}")
    # Mention the structure only if nothing else differs, e.g. a list on one rank and a tuple on another.
    structural = [line for line in lines if f" {STRUCTURE}" in line]
    return structural if len(structural) == len(lines) else [line for line in lines if line not in structural]


def leaf_names(spec: pytree.TreeSpec) -> list[str]:
    """Name of each leaf of a call's arguments."""
    slots = pytree.tree_unflatten([_Slot(position) for position in range(spec.num_leaves)], spec)
    paths, _ = pytree.tree_flatten_with_path(slots)
    return [argument_name(path) for path, _ in sorted(paths, key=lambda each: each[1].position)]


def _named(spec: pytree.TreeSpec, words: Mapping[int, str], mode: Mode) -> dict[str, str]:
    found = {name: words[position] for position, name in enumerate(leaf_names(spec))}
    return {**found, f"the {STRUCTURE} of the arguments": str(spec)[:2000], MODE: _mode(mode)}


def _constants(constants: Sequence[tuple[int, Any]]) -> dict[int, str]:
    return {
        position: str(value) if type(value) is Unread else f"{type(value).__name__} {value!r}"[:LONGEST]
        for position, value in constants
    }


def _mode(mode: Mode) -> str:
    words = "in training" if mode.training else "in evaluation"
    return (
        f"{words}{'' if mode.grad else ' without gradients'}{f' under autocast {mode.autocast}' * bool(mode.autocast)}"
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _grad(requires_grad: bool) -> str:
    return " that needs a gradient" if requires_grad else ""
