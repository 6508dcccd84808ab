"""What launcher, watchers and ranks of a job have in common: names of hosts and ranks, and who may talk to whom.

In: the environment, sockets and pipes. Standard library only, because a rank's watcher runs without site-packages.
Begin with `rank_variables.py` (which rank this process is).
"""
