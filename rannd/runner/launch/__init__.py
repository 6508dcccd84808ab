"""Starts ranks on their hosts.

In: hosts and a command. Out: the command line of an MPI launcher (`mpi.py`, begin there: to add a launcher, add a row
to its table), after checking that every host is ready (`preflight.py`).
"""
