"""Rank argv[1] exits with argv[2]; the others wait until they are ended."""

import signal
import sys

from which import RANK

if sys.argv[1] == RANK:
    print("the last words", file=sys.stderr)
    sys.exit(int(sys.argv[2]))
signal.pause()
