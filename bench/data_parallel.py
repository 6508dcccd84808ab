"""Pure data parallelism beside DistributedDataParallel: samples per second, as a ratio.

    python bench/data_parallel.py [--ranks 2] [--rounds 8] [--steps 4]

Both train the same GPT-2 (configuration of transformers, random tokens, dropout 0, AdamW) in the same processes,
one after the other, in turns whose order is reversed every other round; the first round is dropped. One thread
per rank. A ratio of 1.0 means equally fast, above 1.0 that rannd is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

BATCH, SEQUENCE, VOCABULARY, WIDTH, LAYERS = 8, 128, 8192, 256, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each side in a round")
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        measure(options.rounds, options.steps)
        return
    runner = Path(sysconfig.get_path("scripts")) / "rannc-run"
    command = [str(runner), "-np", str(options.ranks), "--show-ranks", "0", __file__]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    plan = {"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "1", "RANNC_LOG_LEVEL": "warn", "OMP_NUM_THREADS": "1"}
    sys.exit(subprocess.run(command, env={**os.environ, **plan}, check=False).returncode)


def measure(rounds: int, steps: int) -> None:
    """Runs on every rank; rank 0 prints."""
    import torch
    import transformers
    from torch.nn.parallel import DistributedDataParallel

    import pyrannc

    rank, world = pyrannc.get_rank(), pyrannc.get_world_size()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=LAYERS, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip

    def stepper(wrap: Callable[[torch.nn.Module, torch.optim.Optimizer], torch.nn.Module]) -> Callable[[], None]:
        model = transformers.GPT2LMHeadModel(config).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        wrapped = wrap(model, optimizer)
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(rank))

        def step() -> None:
            optimizer.zero_grad()
            wrapped(input_ids=tokens, labels=tokens)["loss"].backward()
            optimizer.step()

        return step

    sides = {
        "rannd": stepper(pyrannc.RaNNCModule),
        "DistributedDataParallel": None,
    }
    sides["rannd"]()  # connects the ranks
    sides["DistributedDataParallel"] = stepper(lambda model, _: DistributedDataParallel(model))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            pyrannc.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            times[name].append((time.perf_counter() - start) / steps)
    if rank == 0:
        kept = {name: values[1:] for name, values in times.items()}
        ratios = [b / a for a, b in zip(kept["rannd"], kept["DistributedDataParallel"], strict=True)]
        for name, values in kept.items():
            middle = statistics.median(values)
            print(f"{name:24s} {world * BATCH / middle:8.2f} samples/s, step {1e3 * middle:.1f} ms", end=" ")
            print(f"({1e3 * min(values):.1f} to {1e3 * max(values):.1f})")
        print(f"ratio: median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})", end=" ")
        print(f"over {len(ratios)} rounds, torch {torch.__version__}")


if __name__ == "__main__":
    main()
