"""The limit of open files is raised where many ranks are expected, or one is told which limit is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, resource, sys
soft, hard, files = map(int, sys.argv[1:4])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
if sys.argv[4:]:
    def setrlimit(which, limits):
        raise {"ValueError": ValueError, "OSError": OSError}[sys.argv[4]]("not allowed")
    resource.setrlimit = setrlimit
from rannd.ranks.open_files import make_room
print(json.dumps([make_room(files, "1000 ranks"), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]))
"""


def after(soft: int, hard: int, files: int, *error: str) -> tuple[str, int]:
    """(message, soft limit) of a process with these limits that makes room; `error`: that of setrlimit."""
    command = [sys.executable, "-c", CODE, str(soft), str(hard), str(files), *error]
    message, limit = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return message, limit


@pytest.mark.parametrize(
    ("soft", "hard", "files", "limit"),
    [(256, 512, 256, 256), (256, 512, 400, 512), (256, 4096, 400, 1424), (256, 512, 512, 512)],
)
def test_the_soft_limit_is_raised_as_far_as_needed(soft: int, hard: int, files: int, limit: int) -> None:
    assert after(soft, hard, files) == ("", limit)


def test_a_hard_limit_that_is_too_low_is_told() -> None:
    message, limit = after(256, 512, 600)
    assert limit == 512
    assert message.startswith("1000 ranks need up to 600 open files, and this process may open 512 (ulimit -Hn): raise")


@pytest.mark.parametrize("error", ["ValueError", "OSError"])
def test_a_limit_that_cannot_be_raised_is_told_although_it_seems_allowed(error: str) -> None:
    """As in sandboxes, and above Linux' fs.nr_open."""
    message, limit = after(256, 512, 400, error)
    assert limit == 256
    assert message.startswith("1000 ranks need up to 400 open files, and this process may open 256 (ulimit -Hn): raise")
