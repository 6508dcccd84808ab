"""What the scripts beside this one have in common: sizes, tokens, and the clock of a job."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

STEPS, ROWS, LENGTH = (int(os.environ[f"PEER_JOB_{name}"]) for name in ("STEPS", "ROWS", "LENGTH"))
CONFIG = {
    "vocab_size": int(os.environ["PEER_JOB_WORDS"]), "n_positions": LENGTH, "n_embd": int(os.environ["PEER_JOB_WIDTH"]),
    "n_layer": int(os.environ["PEER_JOB_LAYERS"]), "n_head": 4, "use_cache": False, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def tokens() -> Any:
    """The batch of a step, of all ranks."""
    import torch

    return torch.randint(CONFIG["vocab_size"], (2 * ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


class Clock:
    """Notes when things happen, in seconds since the epoch, and writes them into the folder PEER_JOB_FOLDER."""

    def __init__(self) -> None:
        self.made = 0.0
        self.ends: list[float] = []
        self.loss: float | None = None

    def built(self) -> None:
        """The model has its values, and is not wrapped yet."""
        self.made = time.time()

    def step(self, loss: Any) -> None:
        """A step has ended; `loss`: None on a rank that does not know it."""
        self.ends.append(time.time())
        self.loss = None if loss is None else float(loss)

    def tell(self) -> None:
        """Write what was noted, and the most resident memory of this process in KiB."""
        # ru_maxrss would count a launcher that was forked, until the interpreter of this process replaced it.
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        told = {
            "built": self.made, "ends": self.ends, "loss": self.loss, "memory": int(status["VmHWM"].split()[0]),
        }  # fmt: skip
        (Path(os.environ["PEER_JOB_FOLDER"]) / str(os.getpid())).write_text(json.dumps(told))
