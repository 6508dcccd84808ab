"""Lets a rank tell an elastic `rannc-run` how far it is: JSON objects, one per line, in a pipe to the rank's watcher.

The fields are below; each is optional. Standard library only: the watcher of a rank runs without site-packages.
"""

from __future__ import annotations

import contextlib
import json
import os

VARIABLE = "RANND_NOTES"
"""Environment variable with the descriptor of the pipe and the process that has it: ``7:4711``."""
LONGEST = 4096
"""Bytes of a line: those that a pipe takes whole (PIPE_BUF)."""

BEGAN = "began"
"""Step of the checkpoint that this start goes on from; 0: there was none."""
STEP = "step"
"""Optimizer steps that are done."""
SAVED = "saved"
"""Step of a checkpoint that is whole."""
WHOLE = "whole"
"""The same, of the training that `pyrannc.elastic` saves; SAVED is of any checkpoint."""
LEFT = "left"
"""The rank ends after this step because it was asked to, and not because its training is over."""
MOST = "most"
"""Number of ranks that the training can have at most."""
SLOW = "slow"
"""First rank of a host that computes slower than the others do; rank 0 tells it."""
SLOW_PERCENT = "slow_percent"
"""Its time relative to the others', in percent; with `SLOW`."""
LEAST_ROWS, MOST_ROWS = "least_rows", "most_rows"
"""Fields of a `RowShares`; with `SLOW`, if the training wants that ranks of slow hosts get fewer rows."""

RESUME_STEP = "RANND_RESUME_STEP"
"""Variable with the step of the newest checkpoint that earlier ranks have told of."""
RESCUED_FOLDER = "RANND_RESCUED_FOLDER"
"""Variable with the folder that parts of a step were written to after the last failure (rescue_folder)."""


def give(descriptor: int) -> None:
    """Let the program that this process executes next write notes to `descriptor`."""
    os.set_inheritable(descriptor, True)
    os.environ[VARIABLE] = f"{descriptor}:{os.getpid()}"


def heard() -> bool:
    """Whether this process is a rank of an elastic job."""
    return os.environ.get(VARIABLE, "").partition(":")[2] == str(os.getpid())


def tell(**fields: int) -> None:
    """Send a note; no-op if nobody reads it, and in processes that a rank has started."""
    if not heard():
        return
    descriptor = os.environ[VARIABLE].partition(":")[0]
    with contextlib.suppress(OSError, ValueError):  # the watcher is gone: it ends this process, too
        os.write(int(descriptor), json.dumps(fields).encode() + b"\n")
