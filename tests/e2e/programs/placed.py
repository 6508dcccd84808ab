"""Runs another program of this folder with several stages per slot (see tests/parity/parity/placing.py).

usage: placed.py SCHEDULE PASSES ZERO PROGRAM [ARGUMENT ..]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "parity")]

from parity.placing import place_plans  # noqa: E402

schedule, passes, zero, program, *arguments = sys.argv[1:]
place_plans(schedule, int(passes), int(zero))
sys.argv = [program, *arguments]
runpy.run_path(program, run_name="__main__")
