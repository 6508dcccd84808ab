"""Propagation rules: from the batch states of an operator's arguments to the state of its result.

In: an `Operation` (`operation.py`, start there) with the states of its arguments (`states.py`). Out: a state, or
`Coupled` if the operator mixes samples. To add a rule, write a function under `@rule("name")` in the file for that
kind of operator; `rule_table.py` imports them all. An operator without a rule is not split.
"""
