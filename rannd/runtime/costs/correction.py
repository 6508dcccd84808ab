"""What the measured steps of a job say of its costs: few numbers, with which later plans are made.

Blocks are measured alone, a stage runs many of them, beside other ranks and behind the runtime. So what a stage takes
is predicted as::

    forward  = sum over kinds k of forward_k x its forwards of this kind + action
    backward = sum over kinds k of backward_k x its backwards of this kind + action

A kind is ``class/part``: the class of work, and the part of the model, which layers have in common; or the class alone.
A single plan says little of numbers that are alike in all its stages. They are therefore estimated together with what
is known beforehand: factors are near 1, near each other above all, more so those of a class, and an action takes some
ten microseconds. A part that no measured stage has gets the factor of its class. This is
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
"""of what those of a class have in common, around that,"""
PART_SPREAD = 0.1
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
    """Factor of each kind of work, and class; one that is not there has its class's, or 1."""
    backward: dict[str, float] = {}
    action_us: float = 0.0
    """Added for each forward and each backward of a microbatch in a stage."""

    def forward_us(self, kinds: Kinds) -> float:
        """Return the time of a stage's forward."""
        return self.action_us + sum(_factor(self.forward, kind) * us for kind, us in kinds.items())

    def backward_us(self, kinds: Kinds) -> float:
        """Return the time of a stage's backward."""
        return self.action_us + sum(_factor(self.backward, kind) * us for kind, us in kinds.items())

    def factors(self, kind: str) -> tuple[float, float]:
        """Return the factors of a kind of work: forward, backward."""
        return _factor(self.forward, kind), _factor(self.backward, kind)


def class_of(kind: str) -> str:
    """Return the class of a kind."""
    return kind.partition("/")[0]


def _factor(factors: Mapping[str, float], kind: str) -> float:
    return factors.get(kind, factors.get(class_of(kind), 1.0))


def fitted(stages: Sequence[StageWork]) -> Correction:
    """Return the correction that the measured stages of one or several plans say, as far as they do."""
    found = _solved(stages, action=True)
    return _solved(stages, action=False) if found.action_us < 0 else found


def _solved(stages: Sequence[StageWork], *, action: bool) -> Correction:
    """Return factors of forwards and of backwards by kind, and the time of an action if there is one.

    Unknown are the common part of all factors, the own part of each class, that of each kind, and the action.
    """
    kinds = sorted({kind for stage in stages for kind in (*stage.forward_us, *stage.backward_us)})
    classes = sorted({class_of(kind) for kind in kinds})
    parts = [kind for kind in kinds if kind not in classes]
    names = [*classes, *parts]
    own = [*[OWN_SPREAD] * len(classes), *[PART_SPREAD] * len(parts)]
    spreads = np.array([COMMON_SPREAD, *own, *own, *[ACTION_US] * action])
    rows, wanted = [], []
    for stage in stages:
        for place, work, us in (
            (0, stage.forward_us, stage.measured_forward_us),
            (len(names), stage.backward_us, stage.measured_backward_us),
        ):
            whole = sum(work.values())
            if not whole or not us:
                continue
            sums = np.zeros(2 * len(names))
            for kind, each in work.items():
                sums[place + names.index(class_of(kind))] += each
                if kind in parts:
                    sums[place + names.index(kind)] += each
            noise = NOISE * us + NOISE_US
            rows.append(np.array([whole, *sums, *[1.0] * action]) / noise)
            wanted.append((us - whole) / noise)  # what differs from factors of 1
    table = np.vstack([*rows, np.diag(1 / spreads)])
    target = np.array([*wanted, *[0.0] * len(spreads)])
    common, *found = map(float, np.linalg.lstsq(table, target, rcond=None)[0])

    def factors(place: int) -> dict[str, float]:
        owns = dict(zip(names, found[place : place + len(names)], strict=True))
        sums = {kind: owns[class_of(kind)] + (owns[kind] if kind in parts else 0.0) for kind in names}
        return {kind: min(max(1.0 + common + each, LEAST_FACTOR), MOST_FACTOR) for kind, each in sums.items()}

    return Correction(factors(0), factors(len(names)), found[-1] if action else 0.0)
