"""Planner: from a task graph and its costs to the fastest deployment that fits memory; pure functions, no torch.

In: a `TaskGraph`, a `CostTable`, devices and options. Out: a `Deployment` (`deployment.py`). Begin with
`search/planner.py`. The files here are shared by all phases: devices (`topology.py`), schedules and ZeRO stages
(`run_modes.py`, `zero.py`, `precision.py`), the user's options (`plan_options.py`).

Folders in the order of a plan: blocks, schedule, simulate, stage_costs, virtual, search.
"""
