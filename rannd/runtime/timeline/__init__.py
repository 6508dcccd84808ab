"""What a rank did in its latest steps, and when, recorded while it goes on (`trace_events`).

In: the begin and end of each action. Out: times of a rank for `rannd.plan.measured_step`, and its events for the
timeline of all ranks. Nothing here knows other ranks. Begin with `recorder.py`.
"""
