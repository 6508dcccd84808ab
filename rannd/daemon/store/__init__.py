"""The store: one SQLite file that recovers from corruption by itself.

In: entries. Out: entries; the least recently used ones are evicted above the size limit. Begin with `store.py`.
"""
