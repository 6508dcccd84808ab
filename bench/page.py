"""Benchmark of the page of a plan (`rannc-cache show KEY --html FILE`): time and size for 1,000 and 10,000 operators.

    python bench/page.py [--repeats 5]

The plans are those of a transformer of tests/plan/plan_graphs.py on 16 devices, with a measured step of as many events
as the predicted one, compared with another plan. A new process reads the stored plan and writes the page, so imports
count; the way to the daemon does not. Nothing is measured on devices.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "plan"), str(TESTS / "runner")]

from _results import Spread, Table, found  # noqa: E402
from plan_graphs import transformer  # noqa: E402
from shown_plans import measured, planned  # noqa: E402

from rannd.plan.deployment import encode  # noqa: E402
from rannd.plan.measured_step import encode_measured  # noqa: E402

PROGRAM = """
import sys
from pathlib import Path
from rannd.plan.deployment import decode
from rannd.plan.measured_step import decode_measured
from rannd.runner.page.html_page import ShownPlan, page
folder = Path(sys.argv[1])
plan, other = (decode((folder / name).read_bytes()) for name in ("plan", "other"))
took = decode_measured((folder / "measured").read_bytes(), plan)
(folder / "page.html").write_bytes(page(ShownPlan("a" * 40, plan, took), "today", ShownPlan("b" * 40, other, None)))
assert "torch" not in sys.modules
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    kb = "{:.0f} KB"
    table = Table(
        "Pages of plans for 16 devices", "operators", ("stored plan", kb), ("compressed", kb), ("page", kb),
        ("time", "{:.2f} s"),
    )  # fmt: skip
    for layers in (59, 588):
        plan, other = (
            planned(transformer(layers), 16, ranked=False, memory=10**15, pipeline_num=8, max_partition_num=64, **items)
            for items in ({"partition_num": 8}, {"partition_num": 4})
        )
        with tempfile.TemporaryDirectory() as name:
            folder, entry = Path(name), encode(plan)
            (folder / "plan").write_bytes(entry)
            (folder / "other").write_bytes(encode(other))
            (folder / "measured").write_bytes(encode_measured(measured(plan, events=True)))
            times = []
            for _ in range(repeats):
                begun = time.perf_counter()
                subprocess.run([sys.executable, "-c", PROGRAM, name], check=True)
                times.append(time.perf_counter() - begun)
            size = (folder / "page.html").stat().st_size
        count = sum(len(stage.ops) for stage in plan.stages)
        sizes = (len(entry), len(zlib.compress(entry)), size)
        table.row(count, *(each / 1e3 for each in sizes), Spread.of(times))
    found("page", statistics.median(times))
    found("page-size", size / 1e6)


if __name__ == "__main__":
    main()
