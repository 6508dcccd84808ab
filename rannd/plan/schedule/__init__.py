"""Pipeline schedules: what every slot does in one step.

In: a layout and a schedule's name. Out: a `Program` (`program.py`, begin there), checked by `program_checker.py`
before it runs. To add a schedule, add its order of computations and a line of the table to `schedules.py`;
`transfers.py` inserts the transfers. What a slot's host issues is made of a Program by `instructions.py`, and checked
for deadlocks of devices with streams by `stream_checker.py`.
"""
