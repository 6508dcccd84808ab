"""Prints where it runs on both streams, and what it was started with."""

import json
import os
import sys

from which import RANK

print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "name": __name__, "stdin": sys.stdin.read(), "rank": RANK}))
print(f"error stream of {RANK}", file=sys.stderr)
