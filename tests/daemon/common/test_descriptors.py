"""Free descriptors are counted as the kernel would give them out."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rannd.daemon.common import descriptors
from rannd.errors import DaemonError

PROGRAM = """
import fcntl, os, resource
from rannd.daemon.common import descriptors

kept = [os.dup(0) for _ in range(20)]
fcntl.fcntl(0, fcntl.F_DUPFD, 200)  # above the limit that comes: it takes none of the free ones
for number in kept[::2]:
    os.close(number)  # holes
resource.setrlimit(resource.RLIMIT_NOFILE, (kept[-1] + 5, 4096))
expected = descriptors.free()
made = 0
try:
    while True:
        os.dup(0)
        made += 1
except OSError:
    pass
assert made == expected, (made, expected)
assert descriptors.free() == 0
print(made)
"""


def test_as_many_are_free_as_can_be_opened() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 10 + 4


def test_a_count_that_is_not_there_is_refused_with_what_to_do() -> None:
    descriptors.require(1, "nothing")
    with pytest.raises(DaemonError, match=r"^a crowd needs \d+ file descriptors, and \d+ of the \d+ .*ulimit -n\)$"):
        descriptors.require(descriptors.limit() + 1, "a crowd")
