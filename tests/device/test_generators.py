"""Random numbers of pieces, apart from the script's."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from rannd.device.generators import drawing_from, kept_generators, other_states, seeded

CPU = torch.device("cpu")


def test_numbers_are_those_of_a_seed_and_the_script_goes_on() -> None:
    torch.manual_seed(3)
    torch.rand(2)
    state = torch.get_rng_state()
    with seeded(CPU, 2**55 + 11):
        found = torch.rand(5)
    assert torch.equal(torch.get_rng_state(), state)
    with kept_generators([CPU]):
        torch.manual_seed(2**55 + 11)
        assert torch.equal(torch.rand(5), found)


def test_the_script_goes_on_after_an_error() -> None:
    def fail() -> None:
        with seeded(CPU, 1):
            torch.rand(3)
            raise ValueError("wrong")

    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="wrong"):
        fail()
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_of_python_and_numpy_can_be_drawn_again() -> None:
    begin = other_states()
    drawn = random.random(), np.random.rand()
    after = other_states()
    with drawing_from(begin):
        assert (random.random(), np.random.rand()) == drawn
        random.random()
    following = random.random(), np.random.rand()
    with drawing_from(after), drawing_from(None):
        assert (random.random(), np.random.rand()) == following
