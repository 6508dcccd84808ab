"""Compiled blocks (`compile_stages`): what is compiled, how long it takes, and what a step gains.

    python bench/compile.py [--ranks 1] [--layers 6] [--width 256] [--rows 8] [--length 128] [--steps 12]

Trains GPT-2 (bench/_gpt2.py) in a cache of its own: compiled for the first time, then ROUNDS times eagerly and compiled
again, by turns, since other work on a machine comes and goes. Prints the kinds of blocks, those that were compiled, and
the median time of a step without the first ones.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from _gpt2 import Told
from _results import Spread, Table
from _starting import GPT2, SCRIPTS, home

ROUNDS = 3
WARM = 3
"""Steps at the beginning that are not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 1), ("layers", 6), ("width", 256), ("rows", 8), ("length", 128), ("steps", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    table = Table(
        f"GPT-2 with {options.layers} layers of width {options.width} on {options.ranks} ranks", "run", "kinds",
        "compiled", ("first step", "{:.1f} s"), ("step", "{:.0f} ms"),
    )  # fmt: skip
    with home() as environment:
        show(table, "compiled, first run", [train(environment, "blocks", options)])
        eager, again = [], []
        for _ in range(ROUNDS):
            eager.append(train(environment, "off", options))
            again.append(train(environment, "blocks", options))
        show(table, "compiled, later runs", again)
        show(table, "eager", eager[1:])  # the first one has traced and measured


def show(table: Table, name: str, runs: list[tuple[str, list[Told]]]) -> None:
    """Print the row of some equal runs."""
    output = runs[0][0]
    made = re.search(r"Compiled (\d+) kinds? of blocks in [\d.]+ s \((\d+) from the cache\)", output)
    loaded = re.search(r"(\d+) kinds? of blocks from the cache", output)
    compiled = int(made[1]) if made else 0
    kinds = compiled + int(made[2]) if made else int(loaded[1]) if loaded else 0
    ranks = [each for _, told in runs for each in told]
    steps = [after - before for each in ranks for before, after in pairwise(each["ends"][WARM:])]
    first = statistics.median(each["ends"][0] - each["built"] for each in ranks)
    table.row(name, kinds, compiled, first, Spread.of(steps, 1e3))


def train(environment: Mapping[str, str], mode: str, options: argparse.Namespace) -> tuple[str, list[Told]]:
    """Train once; returns the output of the job, and what its ranks have measured."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = [f"--{name}={getattr(options, name)}" for name in ("steps", "layers", "width", "rows", "length")]
        command = [str(SCRIPTS / "rannc-run"), "-np", str(options.ranks), GPT2, "rannd", folder, *sizes]
        variables = {**environment, "RANNC_COMPILE_STAGES": mode}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{output}")
        return output, [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(options.ranks)]


if __name__ == "__main__":
    main()
