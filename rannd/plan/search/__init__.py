"""The stages, replicas and microbatches with the least time per step.

In: blocks, costs, devices. Out: a plan. Begin with `planner.py`; `stages.py` is the exact search, `estimate.py` its
closed form E, `bounds.py` what it need not look at, `ranking.py` the simulator's word on the best ones.
"""
