"""The Python state and code of the model's modules, as far as tracing depends on it.

In: modules. Out: guards on the attributes that a trace depends on (`guards.py`, start there; `snapshot.py` and
`contained_objects.py` read attributes without running user code), custom `autograd.Function` classes, the source line
that causes a problem, and the side effects of user code that have to be undone.
"""
