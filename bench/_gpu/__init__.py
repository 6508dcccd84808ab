"""The parts of bench/gpu.py: what is worth knowing on a machine with one GPU.

`correct`, `speed`, `estimates` and `shared` are the parts; each is a list of checks that `record` runs within a time
budget and writes down one by one. `page` shows them, with go or no-go at the end.
"""
