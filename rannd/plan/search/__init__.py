"""Search for the stages, replicas and microbatches with the smallest step time.

In: blocks, costs, devices. Out: a plan. Begin with `planner.py`; `stages.py` is the exact search, `bounds.py` the lower
bounds that prune it, `ranking.py` re-ranks the best plans with the simulator, `virtual_planner.py` lets plans with
several stages per slot compete with them.
"""
