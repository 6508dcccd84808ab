"""Starts ranks on their hosts.

In: hosts and a command. Out: the command line of an MPI launcher (`mpi.py`, begin there: one function for each kind of
launcher), after checking that every host is ready (`preflight.py`).
"""
