"""What a stage takes: time and memory of every run of blocks on any number of replicas, and which of them recompute.

`intervals` sums costs over runs of blocks, `microbatch_counts` tells how many microbatches are in flight,
`stage_memory` what they and the training state take, and `estimate` makes the terms of the closed form: begin there.
"""
