"""Corrections of costs from measured stages: what they find, and that other plans are predicted no worse."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import NamedTuple

import msgspec
import pytest

from rannd.runtime.costs.correction import ACTION_US, Correction, Kinds, StageWork, class_of, fitted

KINDS = ("products", "others")


class Block(NamedTuple):
    kind: str
    forward_us: float
    backward_us: float


class Computer:
    """A model on a machine on which stages take something else than their blocks do alone."""

    def __init__(self, seed: int, *, noise: float = 0.02, parts: bool = False) -> None:
        """`parts`: blocks are of different kinds, with factors of their own, and some of the same kind."""
        random = self.random = Random(seed)
        common = random.uniform(0.8, 1.5)
        forward, backward = ({kind: common * random.uniform(0.9, 1.1) for kind in KINDS} for _ in range(2))
        self.noise = noise
        self.blocks: list[Block] = []
        for number in range(random.randint(4, 24)):
            if parts and self.blocks and random.random() < 0.6:
                self.blocks.append(random.choice(self.blocks))
                continue
            us, kind = math.exp(random.uniform(math.log(100), math.log(20_000))), random.choice(KINDS)
            if parts:
                own = f"{kind}/{number}"
                forward[own], backward[own] = (each[kind] * random.uniform(0.9, 1.1) for each in (forward, backward))
                kind = own
            self.blocks.append(Block(kind, us, us * random.uniform(1.0, 2.5)))
        self.true = Correction(forward, backward, random.choice([0.0, random.uniform(20, 150)]))

    def stages(self, count: int, scale: float = 1.0) -> list[StageWork]:
        """A plan of so many stages, and what its steps take; `scale`: of the microbatches."""
        borders = [0, *sorted(self.random.sample(range(1, len(self.blocks)), count - 1)), len(self.blocks)]
        found = []
        for start, end in itertools.pairwise(borders):
            forward, backward = {}, {}
            for kind in {each.kind for each in self.blocks[start:end]}:
                forward[kind] = scale * sum(each.forward_us for each in self.blocks[start:end] if each.kind == kind)
                backward[kind] = scale * sum(each.backward_us for each in self.blocks[start:end] if each.kind == kind)
            found.append(StageWork(forward, backward, self.takes(self.true.forward_us(forward)), 0.0))
            found[-1] = msgspec.structs.replace(
                found[-1], measured_backward_us=self.takes(self.true.backward_us(backward))
            )
        return found

    def takes(self, us: float) -> float:
        return us * self.random.uniform(1 - self.noise, 1 + self.noise)


def of_classes(stage: StageWork) -> StageWork:
    """The same stage, as if parts of a class had one factor."""

    def sums(kinds: Kinds) -> dict[str, float]:
        return {name: sum(us for kind, us in kinds.items() if class_of(kind) == name) for name in map(class_of, kinds)}

    return msgspec.structs.replace(stage, forward_us=sums(stage.forward_us), backward_us=sums(stage.backward_us))


def error(stages: list[StageWork], correction: Correction) -> float:
    """Of the slowest stage, which decides the time of a step, relative."""
    true = max(each.measured_forward_us + each.measured_backward_us for each in stages)
    told = max(correction.forward_us(each.forward_us) + correction.backward_us(each.backward_us) for each in stages)
    return abs(told / true - 1)


@pytest.mark.parametrize("parts", [False, True])
def test_plans_that_were_not_used_are_predicted_no_worse(parts: bool) -> None:
    before, after, coarse = [], [], []
    for seed in range(300):
        computer = Computer(seed, parts=parts)
        stages = computer.stages(computer.random.randint(1, 4))
        correction, by_class = fitted(stages), fitted([of_classes(each) for each in stages])
        for count in (1, 2, 3, 4):
            for scale in (0.25, 1.0, 2.0):
                other = computer.stages(count, scale)
                before.append(error(other, Correction()))
                after.append(error(other, correction))
                coarse.append(error([of_classes(each) for each in other], by_class))
    worse, worse_coarse = (
        sum(now > max(then + 0.02, 0.06) for then, now in zip(before, each, strict=True)) for each in (after, coarse)
    )
    # Where each part has an error of its own, a measured stage may be unlike all others.
    assert worse <= (worse_coarse if parts else 0)
    assert worse < len(after) / 200
    for errors in (before, after, coarse):
        errors.sort()
    assert after[len(after) // 2] < 0.03 < before[len(before) // 2]
    late, late_coarse = (each[int(0.95 * len(each))] for each in (after, coarse))
    assert late < (0.9 * late_coarse if parts else 0.07)
    if not parts:
        assert after == pytest.approx(coarse)


def test_what_is_right_stays_right() -> None:
    for seed in range(100):
        computer = Computer(seed, noise=0.02)
        computer.true = Correction()
        for count in (1, 3):
            found = fitted(computer.stages(count))
            assert error(computer.stages(2), found) < 0.05, seed
            assert found.action_us < ACTION_US


def test_kinds_and_actions_are_told_apart_where_stages_differ() -> None:
    true = Correction({"products": 1.3, "others": 1.1}, {"products": 1.25, "others": 1.2}, 80.0)
    stages = []
    for products, others in ((500.0, 10.0), (20.0, 400.0), (5000.0, 100.0), (100.0, 4000.0), (60.0, 60.0)):
        forward = {"products": products, "others": others}
        backward = {"products": 2 * products, "others": 1.5 * others}
        stages.append(StageWork(forward, backward, true.forward_us(forward), true.backward_us(backward)))
    found = fitted(stages)
    for kind in KINDS:
        assert found.forward[kind] == pytest.approx(true.forward[kind], abs=0.03)
        assert found.backward[kind] == pytest.approx(true.backward[kind], abs=0.03)
    assert found.action_us == pytest.approx(80, abs=10)


def test_a_part_that_was_measured_wrongly_does_not_spoil_others() -> None:
    """Layers on both stages, and a head on the second, whose time was measured a sixth too short."""
    head, layer = "products/head", "products/layer"
    works = [({layer: 4000.0}, 1.0), ({layer: 2000.0, head: 2000.0}, 1.1)]
    stages = [
        StageWork(work, {kind: 2 * us for kind, us in work.items()}, wrong * 4000.0, wrong * 8000.0)
        for work, wrong in works
    ]
    found = fitted(stages)
    for kinds, us in (({layer: 3000.0}, 3000.0), ({layer: 3000.0, head: 2000.0}, 5400.0)):
        assert found.forward_us(kinds) == pytest.approx(us, rel=0.02)
        assert found.backward_us(kinds) == pytest.approx(us, rel=0.02)
    assert found.factors("products/another")[0] == found.forward["products"], "that of its class"
    assert found.factors("others/another") == (1.0, 1.0)


def test_stages_that_compute_less_than_predicted_have_no_negative_action() -> None:
    stages = [StageWork({"a": us}, {"a": 2 * us}, 0.9 * us - 30, 1.8 * us - 30) for us in (200.0, 2000.0)]
    found = fitted(stages)
    assert found.action_us == 0.0
    assert 0.8 < found.forward["a"] < 1.0


def test_without_backward_or_any_stage_nothing_is_invented() -> None:
    assert fitted([]) == Correction()
    forward_only = fitted([StageWork({"a": 1000.0}, {}, 1200.0, 0.0)])
    assert forward_only.forward["a"] == pytest.approx(1.2, abs=0.05)
    assert Correction().forward_us({"a": 3.0, "b": 4.0}) == 7.0
