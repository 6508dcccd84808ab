"""What a stage takes: time and memory of every run of blocks on any number of replicas, and which of them recompute.

`intervals` sums costs over runs of blocks, `estimate` makes the terms of the closed form of them: begin there.
"""
