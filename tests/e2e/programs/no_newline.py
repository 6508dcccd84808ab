"""The last line has no end."""

import sys

print("first")
sys.stdout.write("last")
sys.stderr.write("error without end")
