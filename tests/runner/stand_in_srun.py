"""What stands in for Slurm's srun: it records its command line, and starts ranks on this machine as srun does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

SRUN = """#!{python}
import itertools, json, os, subprocess, sys
if sys.argv[1:] == ["--version"]:
    print("slurm 23.11.4")
    sys.exit()
with open({record!r}, "w") as record:
    json.dump(sys.argv[1:], record)
options = list(itertools.takewhile(lambda each: each.startswith("--"), sys.argv[1:]))
asked = [each.split("=")[1] for each in options if each.startswith("--ntasks=")]
count = int(asked[0] if asked else os.environ["SLURM_NTASKS"])
command = sys.argv[1 + len(options):]
ranks = [
    subprocess.Popen(command, env=os.environ | {{
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_TASKS_PER_NODE": str(count), "SLURM_STEP_NODELIST": "n1",
        "SLURM_JOB_ID": "4711",
    }})
    for rank in range(count)
]
codes = [rank.wait() for rank in ranks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""


def install(folder: Path, record: Path) -> Path:
    """An srun in `folder`, which is made; it writes its arguments to `record`."""
    folder.mkdir(exist_ok=True)
    srun = folder / "srun"
    srun.write_text(SRUN.format(python=sys.executable, record=str(record)))
    srun.chmod(0o755)
    return srun


def recorded(record: Path) -> list[str]:
    """The arguments of the last call."""
    found: list[str] = json.loads(record.read_text())
    return found
