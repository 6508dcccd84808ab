"""Search for the stages, replicas and microbatches with the smallest step time.

In: blocks, costs, devices. Out: a plan. Begin with `planner.py`; `stages.py` is the exact search, `estimate.py` its
closed form E, `bounds.py` the lower bounds that prune it, `ranking.py` re-ranks the best plans with the simulator.
"""
