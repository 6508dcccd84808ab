"""The commands `rannc-run` and `rannc-cache`.

In: a command line. Out: ranks that were started, watched and ended. Begin with `run.py` and `job.py` (every detail of
a job, decided before anything starts).

Folders: resources (hosts and ranks that this process was given), watch (a running job), launch (how ranks get to
hosts), cache (`rannc-cache`).
"""
