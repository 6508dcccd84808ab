"""Data structures for traced graphs: values and symbolic sizes.

In: exported FX graphs. Out: `Traced` (`traced.py`, start there), whose nodes carry dtypes and sizes as functions of
the number of rows (`symbolic_values.py`, `sizes.py`); the torch-free `TaskGraph` (`ir.py`). Also here: opaque
operators (`leaf_op.py`), aliasing, memory layout and FLOPs of nodes, and where a graph runs (`retarget.py`).
"""
