"""Shared by client and server.

Messages (`protocol.py`, begin there; docs/protocol.md), keys of entries (`keys.py`), paths and locks, compression,
versions.
"""
