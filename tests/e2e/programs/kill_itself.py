"""Rank 1 dies by SIGKILL, as under the kernel's out-of-memory killer; the others wait until they are ended."""

import os
import signal

from which import RANK

if RANK == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
