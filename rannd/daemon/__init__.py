"""`rannd`, the daemon that caches traces, profiles and deployments of one user on one node.

In: requests over ZeroMQ. Out: values by key. Begin with `client/cache.py` (the API that a job calls), then
`server/server.py`. The files here are the command `rannd` and its output. No torch is imported anywhere in it.

Folders, from the lowest layer: common, store, server, client.
"""
