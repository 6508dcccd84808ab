"""The random numbers of a rank's script: torch's, numpy's and Python's generators as plain data, and back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rannd.device.generators import generator_state, set_generator_state
from rannd.device.identity import is_accelerator
from rannd.errors import CheckpointError

_KEY = 624
"""Numbers in the state of the Mersenne Twister."""


def random_state(device: torch.device) -> dict[str, Any]:
    """Where this process's generators are: torch on the CPU and on the rank's device, numpy's global one, Python's."""
    version, numbers, gauss = random.getstate()
    legacy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, numbers, gauss),
        "numpy": {
            "bit_generator": str(legacy["bit_generator"]),
            "key": [int(each) for each in legacy["state"]["key"]],
            "pos": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        }
        if legacy["bit_generator"] == "MT19937"
        else None,
    }
    if is_accelerator(device):
        state[device.type] = generator_state(device)
    return state


def check_random_state(state: dict[str, Any], device: torch.device) -> None:
    """CheckpointError where generators cannot be put to this: it is tried on others, which are made for it."""
    accelerator = torch.Generator(device).set_state
    try:
        _restore(state, torch.Generator().set_state, random.Random(), np.random.RandomState(), accelerator, device)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RuntimeError) as exc:
        raise CheckpointError(
            f"its random numbers are damaged: {type(exc).__name__}: {exc}. Nothing was loaded; rng=False loads the rest"
        ) from exc


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to where they were."""

    def accelerator(numbers: torch.Tensor) -> None:
        set_generator_state(device, numbers)

    _restore(state, torch.set_rng_state, random, np.random, accelerator, device)


def _restore(
    state: dict[str, Any],
    cpu: Callable[[torch.Tensor], object],
    python: Any,
    numpy: Any,
    accelerator: Callable[[torch.Tensor], object],
    device: torch.device,
) -> None:
    cpu(state["torch"])
    version, numbers, gauss = state["python"]
    if gauss is not None and type(gauss) is not float:
        raise TypeError("what is left of Python's normal numbers is no number")
    python.setstate((version, tuple(numbers), gauss))
    saved = state["numpy"]
    if saved is not None:
        if not 0 <= saved["pos"] <= _KEY:  # numpy would read beside its key
            raise ValueError(f"numpy's place is {saved['pos']}")
        key = np.array(saved["key"], dtype=np.uint32)
        numpy.set_state((saved["bit_generator"], key, saved["pos"], saved["has_gauss"], saved["gauss"]))
    if is_accelerator(device) and device.type in state:
        accelerator(state[device.type])
