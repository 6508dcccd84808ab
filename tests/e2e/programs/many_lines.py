"""Long lines, written in pieces, many of them: none may be torn or mixed with another rank's."""

import os
import sys

rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
for number in range(200):
    sys.stdout.write(f"{rank} {number} ")
    sys.stdout.flush()
    sys.stdout.write(rank * 9000 + "\n")
