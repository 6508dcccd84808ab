"""Initialises MPI; rank 1 then leaves without finalising, by MPI_Abort or by os._exit, with code 9."""

import os
import sys

from mpi4py import MPI

world = MPI.COMM_WORLD
assert world.size == int(os.environ["OMPI_COMM_WORLD_SIZE"])
if world.rank == 1:
    print("rank 1 leaves", file=sys.stderr, flush=True)
    if sys.argv[1] == "abort":
        world.Abort(9)
    os._exit(9)
world.barrier()
