"""The random numbers of a rank's script: torch's, numpy's and Python's generators as plain data, and back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from rannd.device.generators import generator_state, set_generator_state
from rannd.device.identity import is_accelerator


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


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators back to where they were."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy = state["numpy"]
    if numpy is not None:
        key = np.array(numpy["key"], dtype=np.uint32)
        np.random.set_state((numpy["bit_generator"], key, numpy["pos"], numpy["has_gauss"], numpy["gauss"]))
    if is_accelerator(device) and device.type in state:
        set_generator_state(device, state[device.type])
