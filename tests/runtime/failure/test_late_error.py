"""The exit code of a last save that failed, whatever becomes of its message."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rannd.errors import CheckpointError

PROGRAM = """
from rannd.errors import CheckpointError
from rannd.runtime.failure import late_error

class Lost:
    unseen = untold = CheckpointError("the disk is full")

late_error.follow(Lost())
"""


def ended(stderr: int) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-u", "-c", PROGRAM], stderr=stderr, check=False)


def test_it_is_the_last_line_and_the_exit_code() -> None:
    done = ended(subprocess.PIPE)
    assert done.returncode == CheckpointError.exit_code == 8
    assert done.stderr.decode().splitlines()[-1] == "rannd.errors.CheckpointError: the disk is full"


@pytest.mark.parametrize("where", ["a full disk", "nobody"])
def test_a_message_that_cannot_be_written_does_not_change_the_exit_code(where: str) -> None:
    if where == "nobody":
        reader, stderr = os.pipe()
        os.close(reader)
    else:
        stderr = os.open("/dev/full", os.O_WRONLY)
    done = ended(stderr)
    os.close(stderr)
    assert done.returncode == 8
