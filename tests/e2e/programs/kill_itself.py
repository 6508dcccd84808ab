"""Rank 1 dies by SIGKILL, as under the kernel's out-of-memory killer; the others wait until they are ended."""

import os
import signal

if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
