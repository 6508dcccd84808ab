"""What surrounds `RaNNCModule`: what may be wrapped, and other libraries' and RaNNC's names for it.

In: a model, its optimizer, and what a script does with the wrapper. Out: errors of what cannot be wrapped
(`wrap_checks.py`, begin there; `registry.py` lists the wrapped models), calls of the inner model that run the plan
(`inner_calls.py`), answers to other wrappers (`other_wrappers.py`), and the rest of RaNNC's API (`rannc_api.py`).
"""
