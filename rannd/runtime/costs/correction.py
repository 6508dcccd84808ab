"""What the measured steps of a job say of its costs: few numbers, with which later plans are made.

Blocks are measured alone, a stage runs many of them, beside other ranks and behind the runtime. So what a stage takes
is predicted as::

    forward  = sum over kinds k of forward_k x its forwards of this kind + action
    backward = sum over kinds k of backward_k x its backwards of this kind + action

A single plan says little of numbers that are alike in all its stages. They are therefore estimated together with what
is known beforehand: factors are near 1, near each other above all, and an action takes some ten microseconds. This is
Bayesian linear regression (Bishop, Pattern Recognition and Machine Learning, 2006, section 3.3) with Gaussian priors;
what the steps do not tell stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

COMMON_SPREAD = 0.4
"""Standard deviation of what all factors have in common, around 1,"""
OWN_SPREAD = 0.1
"""and of each around that."""
ACTION_US = 100.0
"""Standard deviation of the microseconds of an action, around 0; they are not negative."""
NOISE, NOISE_US = 0.02, 10.0
"""Standard deviation of a measured time, relative to it, and in microseconds."""
LEAST_FACTOR, MOST_FACTOR = 0.2, 5.0
"""What a factor can be: what is beyond has other reasons."""

Kinds = Mapping[str, float]
"""Microseconds by kind of work."""


class StageWork(msgspec.Struct, frozen=True):
    """What a stage computes for one microbatch."""

    forward_us: Kinds
    """Costs of its parts by kind, as they were measured alone."""
    backward_us: Kinds
    measured_forward_us: float
    """What it took in steps."""
    measured_backward_us: float


class Correction(msgspec.Struct, frozen=True):
    """How costs of blocks become those of stages in a step."""

    forward: dict[str, float] = {}
    """Factor of each kind of work; 1 for one that is not there."""
    backward: dict[str, float] = {}
    action_us: float = 0.0
    """Added for each forward and each backward of a microbatch in a stage."""

    def forward_us(self, kinds: Kinds) -> float:
        """Return the time of a stage's forward."""
        return self.action_us + sum(self.forward.get(kind, 1.0) * us for kind, us in kinds.items())

    def backward_us(self, kinds: Kinds) -> float:
        """Return the time of a stage's backward."""
        return self.action_us + sum(self.backward.get(kind, 1.0) * us for kind, us in kinds.items())

    def factors(self, kind: str) -> tuple[float, float]:
        """Return the factors of a kind of work: forward, backward."""
        return self.forward.get(kind, 1.0), self.backward.get(kind, 1.0)


def fitted(stages: Sequence[StageWork]) -> Correction:
    """Return the correction that the measured stages of one or several plans say, as far as they do."""
    kinds = sorted({kind for stage in stages for kind in (*stage.forward_us, *stage.backward_us)})
    found = _solved(stages, kinds, action=True)
    if found[-1] < 0:
        found = [*_solved(stages, kinds, action=False), 0.0]
    factors = [min(max(each, LEAST_FACTOR), MOST_FACTOR) for each in found[:-1]]
    forward, backward = factors[: len(kinds)], factors[len(kinds) :]
    return Correction(dict(zip(kinds, forward, strict=True)), dict(zip(kinds, backward, strict=True)), found[-1])


def _solved(stages: Sequence[StageWork], kinds: Sequence[str], *, action: bool) -> list[float]:
    """Return factors of forwards and of backwards by kind, and the time of an action if there is one.

    Unknown are the common part of all factors, the own part of each, and the action.
    """
    count = 2 * len(kinds)
    spreads = np.array([COMMON_SPREAD, *[OWN_SPREAD] * count, *[ACTION_US] * action])
    rows, wanted = [], []
    for stage in stages:
        for place, work, us in (
            (0, stage.forward_us, stage.measured_forward_us),
            (len(kinds), stage.backward_us, stage.measured_backward_us),
        ):
            parts = np.zeros(count)
            parts[place : place + len(kinds)] = [work.get(kind, 0.0) for kind in kinds]
            whole = float(parts.sum())
            if not whole or not us:
                continue
            noise = NOISE * us + NOISE_US
            rows.append(np.array([whole, *parts, *[1.0] * action]) / noise)
            wanted.append((us - whole) / noise)  # what differs from factors of 1
    table = np.vstack([*rows, np.diag(1 / spreads)])
    target = np.array([*wanted, *[0.0] * len(spreads)])
    found = np.linalg.lstsq(table, target, rcond=None)[0]
    return [*(1.0 + float(found[0]) + float(own) for own in found[1 : 1 + count]), *map(float, found[1 + count :])]
