"""The Python state of the model's modules, which a call has to find as it was when the model was traced.

In: modules. Out: their state, what differs between two states, and the undoing of changes (`guards.py`, start there);
`snapshot.py` reads attributes without running user code, `recorded_values.py` compares them, and `state_reader.py`
reads the same model again in each call.
"""
