"""Elastic jobs: the ranks are started anew over the hosts that there are, whenever these change or a rank fails.

In: the options of `rannc-run --elastic`. Out: the exit code of the job. Begin with `supervisor.py`; docs/elastic.md
draws its states.
"""
