"""Runs code in a process with little time and memory."""

from __future__ import annotations

import os
import resource
import traceback
from collections.abc import Callable

import psutil


def costs_little(run: Callable[[], None]) -> bool:
    """Whether code ends well within a minute of computing and a GiB of memory, in a fork."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
            limit = psutil.Process().memory_info().vms + (1 << 30)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
