"""The daemon's process.

In: requests. Out: replies. Begin with `server.py`; `boot.py` becomes the daemon, `leases.py` decides who makes a
missing value.
"""
