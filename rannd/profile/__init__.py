"""Cost model: measures or estimates what the blocks of a model cost on a device.

In: blocks of a graph as modules, or a torch-free `TaskGraph` for devices that are not available (`analytic.py`). Out: a
`CostTable` (`costs.py`, begin there), from measured points (`measure.py`, `points.py`) and measured links
(`links.py`).
"""
