"""Long lines, written in pieces, many of them: none may be torn or mixed with another rank's."""

import sys

from which import RANK

for number in range(200):
    sys.stdout.write(f"{RANK} {number} ")
    sys.stdout.flush()
    sys.stdout.write(RANK * 9000 + "\n")
