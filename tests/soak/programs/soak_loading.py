"""soak_loading.py MODEL=FOLDER ..: loads each FOLDER/last into one process, and prints its step."""

from __future__ import annotations

import sys
from pathlib import Path

import soak_models
import torch

import pyrannc

for argument in sys.argv[1:]:
    name, _, folder = argument.partition("=")
    model = soak_models.network(name)
    optimizer = soak_models.optimizer_of(name, model)
    step = pyrannc.load_checkpoint(Path(folder) / "last", model, optimizer).step
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    print(f"loaded {folder} step {step}", flush=True)
