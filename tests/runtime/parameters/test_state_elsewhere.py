"""The entries of a state that another rank has: known by shape and dtype, an error where their values are used."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import save
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.parameters.state_elsewhere import StateElsewhere, TensorElsewhere, described, elsewhere

STATE: dict[str, Any] = {"weight": torch.randn(2, 3, dtype=torch.float64), "counted": torch.tensor(4), "extra": [5]}

COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bfloat16": lambda t: t.bfloat16(),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "copy": copy.copy,
    "cpu": lambda t: t.cpu(),
    "data": lambda t: t.data,
    "deepcopy": copy.deepcopy,
    "detach": lambda t: t.detach(),
    "half": lambda t: t.half(),
    "to": lambda t: t.to("cpu", torch.float32),
    "to meta": lambda t: t.to("meta"),
    "type": lambda t: t.type(torch.float16),
}

USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda t: t + 1,
    "allclose": lambda t: torch.allclose(t, torch.zeros(2, 3)),
    "array": numpy.asarray,
    "bool": lambda t: bool(t.sum()),
    "copy_": lambda t: torch.zeros(2, 3).copy_(t),
    "equal": lambda t: torch.equal(t, t),
    "index": lambda t: t[0],
    "lerp": lambda t: torch.zeros(2, 3, dtype=torch.float64).lerp_(t, 0.5),
    "load": lambda t: nn.Linear(3, 2, dtype=torch.float64).load_state_dict({"weight": t, "bias": torch.zeros(2)}),
    "numpy": lambda t: t.numpy(),
    "parameter": lambda t: nn.Parameter(t) + 1,
    "pickle": pickle.dumps,
    "reshape": lambda t: t.reshape(-1),
    "safetensors": lambda t: save({"weight": t}),
    "save": lambda t: torch.save([t], io.BytesIO()),
    "stack": lambda t: torch.stack([t, t]),
    "storage": lambda t: t.untyped_storage(),
    "tolist": lambda t: t.tolist(),
}


@pytest.fixture
def entry() -> torch.Tensor:
    found: torch.Tensor = elsewhere(described(STATE, ""))["weight"]
    return found


def test_what_a_state_is_can_be_seen() -> None:
    found = elsewhere(described(STATE, ""))
    assert list(found) == list(STATE)
    assert found["weight"].shape == (2, 3)
    assert found["weight"].dtype == torch.float64
    assert found["counted"].shape == ()
    assert found["weight"].numel() == 6
    assert "weight" in repr(found["weight"])
    assert isinstance(found["extra"], StateElsewhere)
    assert list(elsewhere(described(STATE, "w"))) == ["weight"]


@pytest.mark.parametrize("name", COPIES)
def test_copies_have_no_values_either(entry: torch.Tensor, name: str) -> None:
    found, real = COPIES[name](entry), COPIES[name](STATE["weight"])
    assert isinstance(found, TensorElsewhere)
    assert (found.shape, found.dtype, found.device) == (real.shape, real.dtype, real.device)
    with pytest.raises(UsageError, match="needs the values of weight"):
        found.sum()


@pytest.mark.parametrize("name", USES)
def test_a_use_of_its_values_is_an_error(entry: torch.Tensor, name: str) -> None:
    with pytest.raises((UsageError, RuntimeError), match=r"this rank uses a state that another rank has: .* of weight"):
        USES[name](entry)


def test_entries_that_are_no_tensors_are_not_saved() -> None:
    found = copy.deepcopy(elsewhere(described(STATE, ""))["extra"])
    with pytest.raises(UsageError, match="pickle needs the whole state"):
        pickle.dumps({"extra": found})
