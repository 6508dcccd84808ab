"""`rannd`, the daemon that keeps traces, profiles and deployments of one user on one node.

In: requests over ZeroMQ. Out: values by key. Begin with `client/cache.py` (what a job calls), then
`server/server.py`. The files here are the command `rannd` and what it shows. No torch is imported anywhere in it.

Folders, from the lowest layer: common, store, server, client.
"""
