"""Values of a device: used one step later, in one read."""

from __future__ import annotations

import pytest
import torch

from rannd.device import reads
from rannd.device.reads import LateReads, moved, read

CPU = torch.device("cpu")


def test_values_are_used_one_step_later_in_one_read() -> None:
    told: list[tuple[str, list[float]]] = []
    late = LateReads(CPU, late=True)
    before = reads.count()
    for step in range(3):
        late.begin()
        late.add(torch.tensor(step), lambda found: told.append(("loss", list(found))))
        late.end()
        late.add(torch.tensor([[True, False]]), lambda found: told.append(("flags", list(found))))
        assert len(told) == 2 * step, "nothing of this step, everything of the one before"
        assert reads.count() - before == step
    assert told[2:] == [("loss", [1.0]), ("flags", [1.0, 0.0])]


def test_values_are_those_of_the_moment_they_were_added() -> None:
    found: list[float] = []
    late = LateReads(CPU, late=True)
    value = torch.zeros(1, dtype=torch.float64)
    late.add(value, found.extend)
    late.begin()
    value.fill_(7.0)
    late.end()
    assert found == [0.0]


def test_the_script_may_write_into_what_was_added() -> None:
    """A gradient in float64 that the script gives backward is added as it is."""
    found: list[float] = []
    late = LateReads(CPU, late=True)
    given = torch.ones((), dtype=torch.float64)
    late.add(given, found.extend)
    given.fill_(7.0)
    late.settle()
    assert found == [1.0]


def test_all_are_used_before_a_state_is_kept() -> None:
    found: list[float] = []
    late = LateReads(CPU, late=True)
    late.add(torch.tensor(1), found.extend)
    late.begin()
    late.add(torch.tensor(2), found.extend)
    late.settle()
    assert found == [1.0, 2.0]
    before = reads.count()
    late.settle()
    assert reads.count() == before, "a step that adds nothing reads nothing"


def test_an_error_is_raised_once() -> None:
    """What the step that ends with it has added is dropped: the script does not get that step's results."""

    def refuse(found: object) -> None:
        raise ValueError(f"{found}")

    late = LateReads(CPU, late=True)
    late.add(torch.tensor(3), refuse)
    late.begin()
    late.add(torch.tensor(4), refuse)
    with pytest.raises(ValueError, match=r"\[3\.0\]"):
        late.end()
    late.settle()


def test_what_is_forgotten_is_not_used() -> None:
    found: list[float] = []
    late = LateReads(CPU, late=True)
    late.add(torch.tensor(1), found.extend)
    late.begin()
    late.add(torch.tensor(2), found.extend)
    late.forget()
    late.settle()
    assert not found


def test_where_the_host_waits_anyway_values_are_used_at_once() -> None:
    found: list[float] = []
    before = reads.count()
    LateReads(CPU, late=False).add(torch.tensor([1.5, 2.5]), found.extend)
    assert found == [1.5, 2.5]
    assert reads.count() == before + 1


def test_only_a_move_to_the_cpu_is_a_read() -> None:
    tensor, before = torch.ones(2, requires_grad=True), reads.count()
    assert moved(tensor, CPU) is tensor
    assert moved(tensor, torch.device("meta")).is_meta
    assert reads.count() == before
    assert not read(tensor).requires_grad
    assert reads.count() == before + 1
