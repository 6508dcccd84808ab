"""The Python state and code of the model's modules, as far as tracing has to know it.

In: modules. Out: guards on the attributes that a trace depends on (`guards.py`, begin there; `snapshot.py` and
`contained_objects.py` read attributes without running user code), custom `autograd.Function` classes, the source line
behind a problem, and what has to be undone after user code ran.
"""
