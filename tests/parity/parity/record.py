"""What a trainer writes down: named arrays, stored as .npz without pickle.

Names (S: step, C: call within the step, P: path of a leaf in nested arguments or outputs)::

    S/C/loss        value of the objective that backward is called on
    S/C/out/P       outputs of a training call, the scalar loss left out
    S/C/input/P     gradient of an input
    S/C/eval/P      outputs of a call in eval mode
    S/C/probe/P     outputs of a training-mode call under no_grad
    S/C/evalloss    value of the objective in such calls; S/C/probeloss likewise
    S/grad/NAME     gradient of a parameter just before the optimizer's step
    S/nograd/NAME   the same where it is None
    end/param/NAME  parameter after the last step (a rank: those it owns)
    end/state/NAME  entry of state_dict() after the last step
    plan/replicas   ranks of each stage
    plan/micro      microbatches
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Record = dict[str, np.ndarray]


def check_equal(record: Record, expected: Record) -> None:
    """AssertionError if two records differ in any bit."""
    assert record.keys() == expected.keys(), sorted(record.keys() ^ expected.keys())
    wrong = [name for name, value in record.items() if not _same_bits(value, expected[name])]
    assert not wrong, f"{len(wrong)} of {len(record)} differ, the first: {wrong[:5]}"


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()


_NOTHING = np.zeros(0, dtype=bool)


def leaves(tree: Any, path: str = "") -> dict[str, Tensor]:
    """Tensors of nested mappings, tuples and lists, by path. Other leaves are left out."""
    if isinstance(tree, Tensor):
        return {path: tree}
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif isinstance(tree, tuple | list):
        items = enumerate(tree)
    else:
        return {}
    found: dict[str, Tensor] = {}
    for key, value in items:
        found.update(leaves(value, f"{path}.{key}"))
    return found


def shape_of(tree: Any) -> str:
    """The nesting of outputs without their tensors, e.g. ``dict(a=*,b=None)``."""
    if isinstance(tree, Tensor):
        return "*"
    if isinstance(tree, Mapping):
        return f"{type(tree).__name__}({','.join(f'{key}={shape_of(value)}' for key, value in tree.items())})"
    if isinstance(tree, tuple | list):
        return f"{type(tree).__name__}({','.join(map(shape_of, tree))})"
    return repr(tree)


def array(value: Tensor) -> np.ndarray:
    """A copy of the tensor as an array."""
    return value.detach().cpu().clone().numpy()


def put_outputs(record: Record, prefix: str, output: Any, *, without_scalars: bool = False) -> None:
    """Write down every tensor of nested outputs, and their nesting."""
    record[f"{prefix}/"] = np.frombuffer(shape_of(output).encode(), dtype=np.uint8)
    for path, value in leaves(output).items():
        if not (without_scalars and value.ndim == 0):
            record[f"{prefix}/{path}"] = array(value)


def put_input_gradients(record: Record, prefix: str, batch: Any) -> None:
    """Write down gradients of inputs; an empty one and none at all are the same to the user."""
    for path, value in leaves(batch).items():
        if value.grad is not None and value.numel() > 0:
            record[f"{prefix}/{path}"] = array(value.grad)


def put_gradients(record: Record, step: int, gradients: Mapping[str, torch.Tensor | None]) -> None:
    """Write down the gradient of each parameter, or that it has none."""
    for name, gradient in gradients.items():
        if gradient is None:
            record[f"{step}/nograd/{name}"] = _NOTHING
        else:
            record[f"{step}/grad/{name}"] = array(gradient)


def save(record: Record, path: Path) -> None:
    """Store a record; readers never see half of it."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        # npz members are files: a '/' in a name is fine, a leading '/' or '..' never occurs
        np.savez(file, **record)
    os.replace(partial, path)


def load(path: Path) -> Record:
    """Read a stored record."""
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
