"""The daemon as a job sees it: it may help, it never hurts.

In: keys and values. Out: values, or a miss. Begin with `cache.py`; `requests.py` sends requests and starts the daemon
where there is none (`spawn.py`).
"""
