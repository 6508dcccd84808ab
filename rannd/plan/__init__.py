"""From a graph and its costs to the fastest deployment that fits: pure functions, no torch.

In: a `TaskGraph`, a `CostTable`, devices and options. Out: a `Deployment` (`deployment.py`). Begin with
`search/planner.py`. The files here are what all phases share: devices (`topology.py`), what can be run
(`run_modes.py`, `zero.py`), the user's demands (`plan_options.py`).

Folders in the order of a plan: blocks, schedule, simulate, search.
"""
