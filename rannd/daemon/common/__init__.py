"""What client and server share.

The messages (`protocol.py`, begin there; docs/protocol.md), the keys of entries (`keys.py`), paths and locks,
compression, versions.
"""
