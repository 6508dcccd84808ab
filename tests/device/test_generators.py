"""Random numbers of pieces, apart from the script's."""

from __future__ import annotations

import pytest
import torch

from rannd.device.generators import kept_generators, seeded

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
