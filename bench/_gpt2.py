"""Training script for benchmarks: GPT-2 of transformers on random tokens, each rank with its own mini-batch.

    rannc-run -np 2 bench/_gpt2.py rannd FOLDER [--steps 1 --layers 6 --width 256 ...]
    torchrun --nproc-per-node 2 bench/_gpt2.py ddp FOLDER [the same options]

Each rank writes its measurements (`Told`, as JSON) to a file in FOLDER that is named by its rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TypedDict

from _in_turns import GptSizes, gpt2, random_tokens


class Told(TypedDict):
    """Measurements of one rank. Times are seconds since the epoch, comparable with those of the parent process."""

    began: float
    built: float
    """Time when model and optimizer were created, before the model is wrapped."""
    ends: list[float]
    """End of each step."""
    cpu: float
    """CPU seconds of the process from `built` to the end of the first step."""
    modules: list[str]
    """Imported modules at the end of the first step."""
    before: list[str]
    """Imported modules at time `built`: torch, transformers and their dependencies."""


def main() -> None:
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["rannd", "ddp"])
    parser.add_argument("folder", type=Path)
    for name, default in (("steps", 1), ("layers", 6), ("width", 256), ("rows", 8), ("length", 128), ("words", 8192)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()

    import torch

    sizes = GptSizes(options.layers, options.width, options.words, options.length, options.rows)
    model = gpt2(sizes)
    if options.side == "ddp":
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        built, used, before = time.time(), time.process_time(), list(sys.modules)
        model = DistributedDataParallel(model)
    else:
        import pyrannc

        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        built, used, before = time.time(), time.process_time(), list(sys.modules)
        model = pyrannc.RaNNCModule(model, optimizer)
    tokens = random_tokens(sizes, rank)

    ends = []
    cpu = 0.0
    modules: list[str] = []
    for _ in range(options.steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens)["loss"].backward()
        optimizer.step()
        ends.append(time.time())
        cpu = cpu or time.process_time() - used
        modules = modules or list(sys.modules)
    told = Told(began=began, built=built, ends=ends, cpu=cpu, modules=modules, before=before)
    (options.folder / str(rank)).write_text(json.dumps(told))
    if options.side == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
