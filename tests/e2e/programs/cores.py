"""Prints the cores that it may run on."""

import json
import os

print(json.dumps(sorted(os.sched_getaffinity(0))))
