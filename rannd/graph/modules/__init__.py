"""What tracing has to know of the code and the objects of the model's modules.

In: modules. Out: what their attributes contain (`contained_objects.py`), custom `autograd.Function` classes, the source
line that causes a problem (`source_location.py`, start there), and side effects of user code that have to be undone.
"""
