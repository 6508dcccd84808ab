"""soak_training.py MODEL SAVES FOLDER STEPS: trains, from FOLDER/last on if it is there, and prints exact losses.

SAVES: none; plain; asynchronous. What it prints is read by soak_job.py.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import soak_models
import torch

import pyrannc

NAME, SAVES, FOLDER, STEPS = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
EVERY = 4
"""Steps between two saves."""

rank = pyrannc.get_rank()


def tell(text: str) -> None:
    os.write(1, f"rank {rank} {text}\n".encode())  # whole lines, whenever the process is killed


inner = soak_models.network(NAME)
optimizer = soak_models.optimizer_of(NAME, inner)
model = pyrannc.RaNNCModule(inner, optimizer)
first = 1
if (FOLDER / "last").exists():
    first = 1 + (pyrannc.load_checkpoint(FOLDER / "last", model, optimizer).step or 0)
tell(f"begins with step {first}")
saving, saved = None, 0
for step in range(first, STEPS + 1):
    x, y = soak_models.batch(NAME, step, rank)
    optimizer.zero_grad()
    loss = model(x, y) if NAME == "tokens" else torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if step == first:
        tell(f"plan {hashlib.sha256(repr(model.deployment).encode()).hexdigest()[:16]}")
    tell(f"step {step} loss {loss.item().hex()}")
    if saving is not None and saving.done():
        saving.wait()
        tell(f"saved {saved}")
        saving = None
    if SAVES != "none" and step % EVERY == 0:
        if saving is not None:
            saving.wait()
            tell(f"saved {saved}")
        saved = step
        saving = pyrannc.save_checkpoint(
            FOLDER / "last", model, optimizer, step=step, asynchronous=SAVES == "asynchronous"
        )
        if saving is None:
            tell(f"saved {saved}")
if saving is not None:
    saving.wait()
    tell(f"saved {saved}")
tell("finished")
