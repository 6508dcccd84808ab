"""Mixed precision: bytes of gradients and optimizer state per byte of a trainable parameter.

Half-precision parameters with master weights have float32 gradients and state, and the masters themselves. With
`reduce_dtype` gradients are accumulated in the wider of its type and their own, and sent in it.
"""

from __future__ import annotations

from typing import NamedTuple

from rannd.plan.plan_options import PlanOptions

HALF = 2
"""Bytes of an element of float16 and bfloat16."""
WIDE = 4
"""Bytes of an element of a master weight."""
REDUCED = {"float32": 4, "bfloat16": 2}


class StateWeights(NamedTuple):
    """Factors of a parameter's bytes."""

    reduced: float
    """What its holders reduce."""
    gradients: float
    """The gradient that is given to it, and one that is accumulated."""
    optimizer: float
    """What the optimizer keeps of it."""


def state_weights(itemsize: int, options: PlanOptions) -> StateWeights:
    """Factors of a trainable parameter whose elements have `itemsize` bytes."""
    mastered = options.master_weights and itemsize == HALF
    given = WIDE if mastered else itemsize
    reduced = REDUCED.get(options.reduce_dtype, given)
    state = options.opt_param_factor * given / itemsize + (WIDE / itemsize if mastered else 0.0)
    return StateWeights(reduced / itemsize, (given + max(given, reduced)) / itemsize, state)
