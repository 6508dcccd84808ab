"""Elastic jobs: what changes while ranks run, and what follows from it for the next start.

In: the host file, notes of ranks, failures. Out: hosts, waits, whether there is a next start. `supervisor.py` beside
this folder runs a job with them; docs/elastic.md draws its states. Begin with `host_errand.py`.
"""
