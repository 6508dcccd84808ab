"""Propagation rules: from the batch states of an operator's arguments to the state of its result.

In: an `Operation` (`operation.py`, start there) with the states of its arguments (`states.py`). Out: a state, or
`Coupled` if the operator mixes samples. An operator without a rule counts as one that mixes samples, and then the whole
mini-batch runs unsplit; those that torch tags as pointwise need none.

To add a rule, write a function under `@rule("name")` in the file for that kind of operator, or add the name to those of
a function that fits: elementwise (creation, too), shapes (views, permutations, broadcasts), parts (slice, join, repeat,
pad), indexing, reductions (whatever works along given dimensions: sums, sorts, scans, scatters, rolls), products,
layers (pooling, linear algebra, FFT, too), loss_rules, moe_routing (tokens that are sorted and put back).
`rule_table.py` imports them all.
"""
