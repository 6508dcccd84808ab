"""Pipeline schedules: what every slot does in one step.

In: a layout and a schedule's name. Out: a `Program` (`program.py`, begin there), checked by `program_checker.py`
before it runs. To add a schedule, add its order of computations to `schedules.py`; `transfers.py` inserts the
transfers. The planner estimates it as 1F1B until `search/estimate.py` knows its name (docs/architecture.md).
"""
