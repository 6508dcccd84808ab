"""The commands `rannc-run` and `rannc-cache`.

In: a command line. Out: ranks that are started, watched and stopped. Begin with `run.py` and `job.py` (all details of a
job, decided before anything starts).

Folders: resources (hosts and ranks given to this process), watch (a running job), launch (starting ranks on hosts),
cache (`rannc-cache`).
"""
