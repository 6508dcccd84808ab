"""Prints where it runs on both streams, and what it was started with."""

import json
import os
import sys

rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "-"))
print(json.dumps({"argv": sys.argv, "cwd": os.getcwd(), "name": __name__, "stdin": sys.stdin.read(), "rank": rank}))
print(f"error stream of {rank}", file=sys.stderr)
