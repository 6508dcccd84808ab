"""Client of the daemon: what a job calls. Problems with the daemon never stop a job.

In: keys and values. Out: values, or a miss. Begin with `cache.py`; `requests.py` sends requests and starts the daemon
if it does not run (`spawn.py`).
"""
