"""Backward in two halves: gradients of what a part of a graph reads first, gradients of its parameters later.

In: a `Part`. Out: the same part as a module whose operators with parameters queue what the gradients of these need
(`separation.py`, begin there; `deferred_ops.py` has the operators, `gradient_formulas.py` their gradients), and the
queue, which computes and accumulates them (`weight_queue.py`). What does not separate has its whole backward in the
first half.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2.
"""
