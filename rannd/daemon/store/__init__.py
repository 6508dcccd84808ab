"""The store: one SQLite file that heals itself.

In: entries. Out: entries, the least recently used ones gone where space is short. Begin with `store.py`.
"""
