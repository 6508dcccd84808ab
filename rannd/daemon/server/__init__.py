"""The daemon's process.

In: requests. Out: replies. Begin with `server.py`; `boot.py` starts the process, `leases.py` decides which client
computes a missing value.
"""
