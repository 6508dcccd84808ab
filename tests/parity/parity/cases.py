"""The matrix: cases of CI, some of them for `make test`, and all the others.

`COMPACT` covers every pair of values in `PAIRS`, plus cases with a trait of their own (`EXTRA`), and models in
float32; `SOME` of them are for `make test`. `DRAWN` are drawn anew in every run. `FULL` holds every model on every
shape (ranks and stages) with every number of microbatches, under both schedules where there is something to order, the
other factors at random.
"""

from __future__ import annotations

import itertools
import os
import random
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from parity.case import Case
from parity.script import SCRIPTS
from parity.zoo import OPTIMIZERS, ZOO
from rannd.plan.run_modes import OFFLOADS, PARAMS_ZERO, RUN_MODES, Offload, runnable_zero


class Choice(NamedTuple):
    """A value for each factor."""

    model: str
    shape: tuple[int, int]
    """Ranks and stages."""
    micro: int
    schedule: str
    optimizer: str
    script: str
    rows: str
    zero: int
    recompute: str
    """Blocks that recompute: none, some or all."""
    offload: Offload
    activations: bool
    """Whether these are offloaded, too."""


def _rows(pattern: str, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(rows, late rows) of a pattern."""
    match pattern:
        case "even":
            return (8,), ()
        case "uneven":
            return (8, 5, 3, 7)[:ranks], ()
        case "late":  # the last batches of an epoch are smaller
            return (8,), (4,)
        case "lateuneven":
            return (6,), (3, 1, 2, 4)[:ranks]
        case "empty":
            return (*(8, 5, 3)[: ranks - 1], 0), ()
        case "firstempty":
            return (0, 8, 5, 3)[:ranks], ()
    raise ValueError(f"unknown pattern of rows {pattern!r}")


SHAPES = [(ranks, stages) for ranks in (1, 2, 3, 4) for stages in range(1, ranks + 1)]
MICRO = [1, 2, 4, 8]
SCHEDULES = [*dict.fromkeys(way.schedule for way in RUN_MODES), "asked"]
SEED = int(os.environ.get("TEST_SEED", "0"))
"""Of `DRAWN`, see tests/conftest.py; the head of a test run names it."""
DRAWS = 12
PART = 8
"""Of so many cases, `make test` has one."""
ROWS = ["even", "uneven", "late", "lateuneven", "empty", "firstempty"]

APART = ("untraceable", "weighted", "t5", "contrastive", "convmean")
"""Models that `COMPACT` has in `EXTRA` only: the first cannot be cut, the others are for their losses, and the last for
its operators."""

FACTORS: dict[str, Sequence[Any]] = {
    "model": [name for name in ZOO if name not in APART],
    "shape": SHAPES,
    "micro": MICRO,
    "schedule": SCHEDULES,
    "optimizer": list(OPTIMIZERS),
    "script": list(SCRIPTS),
    "rows": ROWS,
    "zero": sorted({way.zero for way in RUN_MODES}),
    "recompute": ["none", "all", "some"],
    "offload": [each for each in OFFLOADS if not each.activations],
    "activations": [False, True],
}

PAIRS = [
    ("model", "stages"),
    ("model", "micro"),
    ("shape", "micro"),
    ("shape", "rows"),
    ("shape", "optimizer"),
    ("schedule", "stages"),
    ("schedule", "micro"),
    ("schedule", "loss"),
    ("script", "stages"),
    ("script", "loss"),
    ("script", "micro"),
    ("rows", "micro"),
    ("rows", "loss"),
    ("zero", "shape"),
    ("zero", "micro"),
    ("zero", "schedule"),
    ("zero", "optimizer"),
    ("zero", "script"),
    ("zero", "rows"),
    ("zero", "recompute"),
    ("recompute", "stages"),
    ("recompute", "schedule"),
    ("recompute", "script"),
    ("zero", "offload"),
    ("optimizer", "offload"),
    ("script", "offload"),
    ("zero", "activations"),
    ("offload", "activations"),
    ("schedule", "activations"),
    ("stages", "activations"),
    ("script", "activations"),
]
"""Pairs of factors, or of traits that follow from them, of which `COMPACT` covers all possible values."""


def possible(choice: Choice) -> bool:
    """Whether a choice makes sense as a case."""
    entry = ZOO[choice.model]
    if choice.rows in ("empty", "firstempty") and (choice.shape[0] == 1 or not entry.empty):
        return False
    if choice.model == APART[0] and choice.shape[1] > 1:
        return False
    if choice.offload.params and choice.zero != PARAMS_ZERO:
        return False
    if choice.zero and choice.shape[0] == choice.shape[1] and not choice.offload.params:
        return False  # no stage has replicas
    if choice.zero >= 2 and choice.shape[0] % choice.shape[1]:
        return False  # all stages have equally many replicas
    if choice.zero not in runnable_zero("gpipe" if choice.schedule == "asked" else choice.schedule):
        return False
    if choice.recompute == "some" and choice.activations:
        return False  # all recompute then
    if choice.schedule in ("gpipe", "zb_h1") and choice.shape[1] == 1:
        return False  # the same as 1f1b
    return not entry.coupled or choice.micro == 1


def pairs_of(choice: Choice) -> set[tuple[str, object, str, object]]:
    """The pairs of values in a choice that `PAIRS` asks for."""
    entry = ZOO[choice.model]
    loss = entry.loss + (" over labels" if entry.labels else "")
    traits = {**choice._asdict(), "stages": choice.shape[1], "loss": loss}
    return {(a, traits[a], b, traits[b]) for a, b in PAIRS}


def _case(choice: Choice) -> Case:
    ranks, stages = choice.shape
    rows, late = _rows(choice.rows, ranks)
    may_stay = choice.zero == PARAMS_ZERO and not choice.offload.params
    may_join = choice.zero >= 2 and choice.recompute == "none"
    number = zlib.crc32(repr(choice).encode())  # for what is so in half of the cases where it may be
    return Case(
        model=choice.model,
        ranks=ranks,
        stages=stages,
        micro=choice.micro,
        schedule=choice.schedule,
        optimizer=choice.optimizer,
        script=choice.script,
        rows=rows,
        late_rows=late,
        zero=choice.zero,
        reshard=may_stay and number & 1 > 0,
        joined=may_join and number & 2 > 0,
        recompute=choice.recompute != "none",
        every_other=choice.recompute == "some" and choice.model != APART[0],  # one operator is one block
        offload=msgspec.structs.replace(choice.offload, activations=choice.activations),
    )


def _cover() -> list[Choice]:
    """A small set of choices with all possible pairs: greedy, best of some random choices for each open pair."""
    source = random.Random(2)
    wanted: dict[tuple[str, object, str, object], None] = {}
    samples: list[Choice] = []
    while len(samples) < 9000:
        sample = Choice(*(source.choice(values) for values in FACTORS.values()))
        if possible(sample):
            samples.append(sample)
            wanted.update(dict.fromkeys(sorted(pairs_of(sample), key=repr)))
    pairs = [pairs_of(sample) for sample in samples]
    chosen: list[Choice] = []
    open_pairs = set(wanted)
    for pair in wanted:
        if pair not in open_pairs:
            continue
        holders = [index for index, held in enumerate(pairs) if pair in held]
        best = max(holders, key=lambda index: (len(pairs[index] & open_pairs), -index))
        chosen.append(samples[best])
        open_pairs -= pairs[best]
    return chosen


SCARCE = (("RANNC_MEM_LIMIT_GB", "0.00008"),)

EXTRA = [
    # the planner decides
    Case("tutorial", ranks=2),
    Case("gpt2", ranks=3),
    # memory forces stages: one stage needs 96 KB at least, without ZeRO
    Case("tutorial", ranks=2, min_stages=2, zero=0, env=SCARCE),
    Case("skip", ranks=4, min_stages=2, optimizer="adam", rows=(8, 5, 3, 7), zero=0, env=SCARCE),
    Case("gpt2", ranks=4, stages=3, micro=2, optimizer="adamw"),
    # what other graphs of a model need from stages that the training graph cut
    Case("latereader", ranks=2, stages=2, micro=2, script="evaluate"),
    # writes that a cut has to respect, weights that only their decay would move
    Case("filled", ranks=3, stages=3, micro=2, optimizer="adamw"),
    Case("spectral", ranks=2, stages=2, micro=2),
    Case("opaque", ranks=2, stages=2),
    Case("opaque", ranks=3, stages=3, optimizer="adamw", script="evaluate", rows=(5, 8, 3)),
    Case("opaque", ranks=4, stages=2, optimizer="adam", script="accumulate"),
    Case("untraceable", ranks=1, script="evaluate"),
    Case("untraceable", ranks=3, optimizer="adam", rows=(8, 5, 3), late_rows=(4, 1, 2)),
    # means over labels that count, with class weights; over pairs of samples
    Case("weighted", ranks=2, stages=2, micro=4, rows=(8, 5), late_rows=(3, 1)),
    Case("weighted", ranks=4, stages=2, micro=2, optimizer="adamw", rows=(3, 8, 1, 5), script="evaluate"),
    Case("t5", ranks=2, stages=2, micro=2, optimizer="adamw", rows=(4, 7)),
    Case("t5", ranks=4, stages=4, micro=4, rows=(5, 3, 1, 4), script="accumulate"),
    Case("contrastive", ranks=2, stages=2, optimizer="adamw", rows=(6, 3)),
    Case("gpt2masked", ranks=4, stages=4, micro=4, optimizer="adam", rows=(4, 2, 1, 7)),
    Case("convloss", ranks=2, stages=2, rows=(7, 4), late_rows=(2, 5)),
    # gradients of parameters that wait: convolutions, lookups, products with a weight that two stages share
    Case("convmean", ranks=2, stages=2, micro=4, schedule="zb_h1", rows=(8, 5)),
    Case("convmean", ranks=3, stages=3, micro=2, schedule="zb_h1", optimizer="adamw", script="accumulate"),
    Case("gpt2", ranks=2, stages=2, micro=4, schedule="zb_h1", optimizer="adam", script="delay"),
    Case("gpt2masked", ranks=4, stages=2, micro=2, schedule="zb_h1", zero=1, optimizer="adamw", rows=(8, 5, 3, 7)),
    Case("t5", ranks=3, stages=3, micro=2, schedule="zb_h1", optimizer="adamw", rows=(4, 7, 2), script="average"),
    # ZeRO 3: parameters stay whole until the last microbatch, or not
    Case("gpt2", ranks=4, stages=2, micro=4, zero=3, optimizer="adamw"),
    Case("gpt2", ranks=4, stages=2, micro=4, zero=3, reshard=True, optimizer="adamw", rows=(8, 5, 3, 7)),
    Case("tied", ranks=2, stages=1, micro=4, zero=3, schedule="asked", script="together", optimizer="adam"),
    Case("mean", ranks=4, stages=2, micro=2, zero=3, schedule="gpipe", script="delay", rows=(8, 5, 3, 7)),
    Case("sum", ranks=2, stages=1, micro=8, zero=3, script="evaluate", rows=(3, 2)),
    Case("frozen", ranks=3, stages=1, micro=2, zero=3, recompute=True, script="accumulate", rows=(8, 5, 0)),
    # an operator with an LSTM, which keeps references to the weights that it was run with
    Case("opaque", ranks=2, stages=1, zero=3, script="evaluate", optimizer="adam"),
    # some blocks recompute, others keep what they have
    Case("skip", ranks=2, stages=2, micro=2, recompute=True, every_other=True, optimizer="adam"),
    Case("gpt2", ranks=2, stages=1, micro=2, zero=2, recompute=True, every_other=True, schedule="asked"),
    # blocks that are one segment together
    Case("gpt2", ranks=4, stages=2, micro=2, zero=2, joined=True, optimizer="adamw", rows=(8, 5, 3, 7)),
    Case("skip", ranks=2, stages=1, micro=4, zero=3, joined=True, reshard=True, script="accumulate"),
    # one-row pieces, fewer rows than microbatches
    Case("mean", ranks=2, stages=2, micro=8, rows=(3, 2)),
    Case("masked", ranks=3, stages=2, micro=4, rows=(3, 1, 2)),
    Case("tutorial", ranks=1, stages=1, micro=8, rows=(1,)),
]


def _single(part: int) -> list[Case]:
    """Every model in single precision, cut in two and in microbatches where that is possible: one of four, the rest."""
    models = [name for number, name in enumerate(ZOO) if name not in APART and bool(number % 4) == bool(part)]
    return [
        Case(name, ranks=2, stages=2, micro=1 if ZOO[name].coupled else 2, rows=(6, 3), precision="float32")
        for name in models
    ]


def _drawn() -> list[Case]:
    """Cases that nobody has chosen."""
    source = random.Random(SEED)
    cases: dict[str, Case] = {}
    while len(cases) < DRAWS:
        choice = Choice(*(source.choice(values) for values in FACTORS.values()))
        if possible(choice):
            cases[_case(choice).name] = _case(choice)
    return list(cases.values())


def _compact() -> list[Case]:
    cases = {case.name: case for case in (*map(_case, _cover()), *EXTRA, *_single(0))}
    return sorted(cases.values(), key=lambda case: (case.ranks, case.name))


def _full() -> list[Case]:
    """Every model x shape x microbatches x schedules; how backward runs, scripts, optimizers and rows are drawn."""
    cases: dict[str, Case] = {}
    source = random.Random(3)
    for model, shape, micro in itertools.product(ZOO, SHAPES, MICRO):
        both = shape[1] > 1 and ZOO[model].loss != "outside"
        for schedule in (name for name in SCHEDULES if name != "asked") if both else ("1f1b",):
            optimizer, script, rows = (source.choice(FACTORS[name]) for name in ("optimizer", "script", "rows"))
            if both and source.random() < 0.25:
                schedule = "asked"
            for pattern in (rows, "uneven"):
                recompute = source.choice(FACTORS["recompute"])
                away = source.random() < 0.25 and recompute != "some"
                attempt = Choice(
                    model, shape, micro, schedule, optimizer, script, pattern, 0, recompute, Offload(), away
                )
                attempts = [
                    again
                    for zero, offload in itertools.product(FACTORS["zero"], FACTORS["offload"])
                    if possible(again := attempt._replace(zero=zero, offload=offload))
                ]
                if attempts:
                    case = _case(source.choice(attempts))
                    cases[case.name] = case
                    break
    cases.update({case.name: case for case in _single(1)})
    return [case for case in cases.values() if case.name not in {compact.name for compact in COMPACT}]


COMPACT = _compact()
SOME = [case for number, case in enumerate(COMPACT) if case in EXTRA or number % PART == 0]
DRAWN = [case for case in _drawn() if case.name not in {compact.name for compact in COMPACT}]
FULL = _full()
