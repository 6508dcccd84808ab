"""Rank 1 exits with code 7 once rank 0, whom it meets at the FIFO argv[1], ignores SIGTERM and SIGINT."""

import os
import signal
import sys

from which import RANK

if RANK == "1":
    with open(sys.argv[1], encoding="ascii") as meeting:
        meeting.read()
    print("the last words", file=sys.stderr)
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(f"pid {os.getpid()}", flush=True)
with open(sys.argv[1], "w", encoding="ascii"):
    pass
while True:
    signal.pause()
