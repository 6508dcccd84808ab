"""The matrix of cases: complete where it says so, and small where time counts."""

from __future__ import annotations

import itertools

import pytest
from parity.case import Case, decode_cases, encode_cases
from parity.cases import APART, COMPACT, FACTORS, FULL, SHAPES, Choice, _cover, pairs_of, possible
from parity.script import SCRIPTS, play
from parity.zoo import ZOO

from rannd.plan.run_modes import Offload


@pytest.mark.long
def test_compact_covers_every_possible_pair() -> None:
    """What `possible` does not ask for takes every value with every choice: it is varied by one or two at once."""
    covered = set().union(*map(pairs_of, _cover()))
    free = ("optimizer", "script", "recompute", "activations")
    params = [Offload(), Offload(params=True)]  # what may be without them may be with an offloaded state as well
    choices = [
        choice
        for values in itertools.product(
            *(
                params if name == "offload" else values[:1] if name in free else values
                for name, values in FACTORS.items()
            )
        )
        if possible(choice := Choice(*values))
    ]
    wanted = set().union(*map(pairs_of, choices))
    for name in free:
        for value in FACTORS[name]:
            varied = (pairs_of(choice._replace(**{name: value})) for choice in choices if choice.rows == "even")
            wanted.update(*varied)
    for script, recompute in itertools.product(FACTORS["script"], FACTORS["recompute"]):
        wanted |= pairs_of(choices[0]._replace(script=script, recompute=recompute))
    for offload in FACTORS["offload"]:
        base = next(choice for choice in choices if possible(choice._replace(offload=offload)))
        for name in ("optimizer", "script", "activations"):
            for value in FACTORS[name]:
                wanted |= pairs_of(base._replace(**{name: value, "offload": offload}))
    assert wanted <= covered


def test_compact_is_bounded() -> None:
    assert len(COMPACT) <= 180


def test_names_are_unique() -> None:
    names = [case.name for case in (*COMPACT, *FULL)]
    assert len(names) == len(set(names))


def test_full_has_every_model_on_every_shape_with_every_number_of_microbatches() -> None:
    held = {(case.model, case.ranks, case.stages, case.micro) for case in (*COMPACT, *FULL)}
    wanted = {
        (model, *shape, micro)
        for model, entry in ZOO.items()
        for shape in SHAPES
        if model != APART[0] or shape[1] == 1
        for micro in ((1,) if entry.coupled else (1, 2, 4, 8))
    }
    assert wanted <= held


def test_cases_survive_json() -> None:
    cases = [*COMPACT, Case("gpt2", ranks=2, env=(("RANNC_MEM_LIMIT_GB", "0.1"),), late_rows=(1, 2))]
    assert decode_cases(encode_cases(cases)) == cases


def test_rows_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows \(1, 2\) are neither"):
        Case("mean", ranks=3, rows=(1, 2)).rows_of(0, 0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_steps_once_and_never_asks_for_a_batch_twice(script: str) -> None:
    class Notes:
        def __init__(self) -> None:
            self.calls: list[tuple[int, int]] = []
            self.steps: list[int] = []
            self.waiting = 0
            self.delayed = False

        def zero(self) -> None: ...
        def allreduce(self) -> None: ...
        def decay(self) -> None: ...

        def forward(self, step: int, call: int) -> None:
            self.calls.append((step, call))
            self.waiting += 1

        def backward(self, scale: float) -> None:
            assert self.waiting
            self.waiting = 0

        def delay(self, on: bool) -> None:
            self.delayed = on

        def optimize(self, step: int) -> None:
            self.steps.append(step)

        def look(self, step: int, call: int, *, training: bool) -> None:
            self.calls.append((step, call))

    notes = Notes()
    play(Case("mean", ranks=1, script=script), notes)
    assert notes.steps == [0, 1, 2, 3, 4]
    assert len(set(notes.calls)) == len(notes.calls)
    assert not notes.waiting
    assert not notes.delayed
