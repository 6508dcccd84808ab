"""One rule per operator: from the states of its arguments to the state of its result.

In: an `Operation` (`operation.py`, begin there) with the states of its arguments (`states.py`). Out: a state, or
`Coupled` where the operator mixes samples. To add a rule, write a function under `@rule("name")` in the file that its
operator belongs to; `rule_table.py` imports them all. No rule: the operator is not split.
"""
