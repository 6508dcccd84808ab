"""Ends well, but a child of it stays, in the session of the rank."""

import os
import signal

pid = os.fork()
if pid == 0:
    signal.pause()
print(f"pid {pid}", flush=True)
