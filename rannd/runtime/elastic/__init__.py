"""Trainings that are saved and go on: `pyrannc.elastic` and `pyrannc.ElasticSampler`.

In: the script's model, optimizer and sampler. Out: checkpoints between steps, and an end when rannc-run asks for one.
Begin with `elastic_state.py`. Meanwhile `snapshots.py` keeps steps in memory, and `stragglers.py` finds slow hosts.
"""
