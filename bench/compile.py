"""Compiled blocks (`compile_stages`): what is compiled, how long it takes, and what a step gains.

    PYTHONPATH=. python bench/compile.py [--ranks 1] [--layers 6] [--width 256] [--rows 8] [--length 128] [--steps 12]

Trains GPT-2 (bench/_gpt2.py) in a cache of its own: compiled for the first time, then ROUNDS times eagerly and compiled
again, by turns, since other work on a machine comes and goes. Prints the kinds of blocks, those that were compiled, and
the median time of a step without the first ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from _gpt2 import Told

HOME = Path(__file__).resolve().parent
ROUNDS = 3
WARM = 3
"""Steps at the beginning that are not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 1), ("layers", 6), ("width", 256), ("rows", 8), ("length", 128), ("steps", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"GPT-2 with {options.layers} layers of width {options.width} on {options.ranks} ranks")
    print(f"{'run':<22} {'kinds':>6} {'compiled':>9} {'first step':>11} {'step':>9}")
    with tempfile.TemporaryDirectory() as home:
        show("compiled, first run", [train(Path(home), "blocks", options)])
        eager, again = [], []
        for _ in range(ROUNDS):
            eager.append(train(Path(home), "off", options))
            again.append(train(Path(home), "blocks", options))
        show("compiled, later runs", again)
        show("eager", eager[1:])  # the first one has traced and measured


def show(name: str, runs: list[tuple[str, list[Told]]]) -> None:
    """Print the row of some equal runs."""
    output = runs[0][0]
    made = re.search(r"Compiled (\d+) kinds? of blocks in [\d.]+ s \((\d+) from the cache\)", output)
    loaded = re.search(r"(\d+) kinds? of blocks from the cache", output)
    compiled = int(made[1]) if made else 0
    kinds = compiled + int(made[2]) if made else int(loaded[1]) if loaded else 0
    ranks = [each for _, told in runs for each in told]
    steps = [after - before for each in ranks for before, after in pairwise(each["ends"][WARM:])]
    first = statistics.median(each["ends"][0] - each["built"] for each in ranks)
    print(f"{name:<22} {kinds:>6} {compiled:>9} {first:>9.1f} s {statistics.median(steps) * 1e3:>6.0f} ms", flush=True)


def train(home: Path, mode: str, options: argparse.Namespace) -> tuple[str, list[Told]]:
    """Train once; returns the output of the job, and what its ranks have measured."""
    environment = {
        **os.environ,
        "RANNC_COMPILE_STAGES": mode,
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_RUNTIME_DIR": str(home),
    }
    with tempfile.TemporaryDirectory() as folder:
        sizes = [f"--{name}={getattr(options, name)}" for name in ("steps", "layers", "width", "rows", "length")]
        command = ["rannc-run", "-np", str(options.ranks), str(HOME / "_gpt2.py"), "rannd", folder, *sizes]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{output}")
        return output, [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(options.ranks)]


if __name__ == "__main__":
    main()
