"""Rank argv[1] exits with argv[2]; the others wait until they are ended."""

import os
import signal
import sys

if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == sys.argv[1]:
    print("the last words", file=sys.stderr)
    sys.exit(int(sys.argv[2]))
signal.pause()
