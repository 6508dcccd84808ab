"""Watches a running job, from its first rank to its last process.

In: a started launcher. Out: its output, line by line, and how it ended. Begin with `monitor.py` (one per job) and
`watcher.py` (one per rank), which communicate by `line_channel.py` and `wire.py`. `kept_memory.py` is what a watcher
does with the memory of a rank that has failed.
"""
