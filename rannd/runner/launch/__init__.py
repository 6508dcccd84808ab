"""How ranks get to their hosts.

In: hosts and a command. Out: the command line of an MPI launcher (`mpi.py`, begin there: to add a launcher, add a row
to its table), after every host was asked whether it is ready (`preflight.py`).
"""
