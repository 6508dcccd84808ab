"""Graphs and their values as data.

In: exported FX graphs. Out: `Traced` (`traced.py`, begin there), whose nodes carry types and sizes as functions of
the number of rows (`symbolic_values.py`, `sizes.py`); the torch-free `TaskGraph` (`ir.py`); the bytes that are kept
in a cache (`codec.py`). Opaque operators (`leaf_op.py`), aliasing, memory layout and FLOPs of nodes are here, too.
"""
