"""What a recorder remakes is what the code would have made."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from rannd.runtime.parameters.op_recorder import Recorder
from rannd.runtime.parameters.op_tape import Unrepeatable, kept_generators


@pytest.fixture(autouse=True)
def alone() -> None:
    """Nothing here needs a world."""


def remade(make: Callable[[], torch.Tensor], seed: int = 1) -> torch.Tensor:
    recorder = Recorder(seed)
    with recorder.recording():
        made = make()
    assert made.is_meta
    view = recorder.view(made)
    assert view is not None
    recorder.tape.name_draws([("it", view)])
    with kept_generators():
        value, holes = recorder.tape.replay(view)
    assert holes is None
    assert (value.shape, value.dtype) == (made.shape, made.dtype)
    return value


def views() -> torch.Tensor:
    base = torch.zeros(4, 6)
    base[1:3, ::2] = torch.arange(6.0).view(2, 3)
    base.t()[5].add_(2)
    return base.view(2, 2, 6)[1].transpose(0, 1)


def through_data() -> torch.Tensor:
    parameter = nn.Parameter(torch.ones(3, 3))
    parameter.data.mul_(4)
    parameter.data[0] = 7
    parameter.data = parameter.data.t() * torch.arange(3.0)
    return parameter


def by_values() -> torch.Tensor:
    rates = [rate.item() for rate in torch.linspace(0, 1, 5)] + torch.arange(3).tolist()
    table = torch.tensor(rates) if torch.ones(2).sum() > 1 else torch.zeros(1)
    kept = table[table > 0.3]
    kept[kept == 1] = 9
    return kept * float(repr(torch.tensor(2.0))[7:-1])


def from_numpy() -> torch.Tensor:
    return torch.from_numpy(numpy.arange(6.0)).view(2, 3)[:, 1:].float() + torch.full((2, 2), 0.5).numpy().sum()


def with_generator() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(3, generator=generator)
    second = torch.empty(3).uniform_(generator=generator)
    return torch.stack([first, second])


def default_dtype() -> torch.Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(2) / 3
    finally:
        torch.set_default_dtype(torch.float32)


def resized() -> torch.Tensor:
    made = torch.ones(2)
    made.resize_(4).fill_(3)
    other = torch.zeros(1)
    other.set_(made)
    return other


@pytest.mark.parametrize(
    "make",
    [views, through_data, by_values, from_numpy, with_generator, default_dtype, resized],
    ids=lambda f: f.__name__,
)
def test_the_same_values_as_without_a_recorder(make: Callable[[], torch.Tensor]) -> None:
    found, expected = remade(make), make().detach()
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype


@pytest.mark.parametrize(
    "mistake",
    [
        lambda made: made.add_(torch.ones(3)),
        lambda made: made.copy_(torch.ones(5, 5)),
        lambda made: made.exponential_(-1.0),
        lambda made: made.normal_(0.0, -1.0, generator=torch.Generator()),
    ],
)
def test_the_codes_own_mistakes_are_errors_where_they_are_made(mistake: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(RuntimeError) as plain:
        mistake(torch.zeros(4, 4))
    with pytest.raises(RuntimeError) as recorded, Recorder(1).recording():
        mistake(torch.zeros(4, 4))
    assert str(recorded.value).partition("\n")[0] == str(plain.value).partition("\n")[0]


def test_a_tensor_made_before_is_copied_and_not_written() -> None:
    before = torch.arange(4.0)
    assert torch.equal(remade(lambda: before * torch.ones(4)), before)
    recorder = Recorder(0)
    with recorder.recording():
        before.add_(torch.ones(4))  # real memory: written for real
        late = before + torch.zeros(4)
    assert torch.equal(before, torch.arange(4.0) + 1)
    before.zero_()
    view = recorder.view(late)
    assert view is not None
    with pytest.raises(Unrepeatable, match="has been modified since"):
        recorder.tape.replay(view)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
        self.weight_normed = parametrizations.weight_norm(nn.Linear(4, 3))
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 3))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(5, 5)))
        self.lstm = nn.LSTM(3, 4)
        self.half = nn.Linear(3, 3).to(torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.embedding = nn.Embedding(5, 3, padding_idx=2)
        noise = torch.randn(3)
        self.one, self.other = nn.Parameter(noise), nn.Parameter(noise * 2)


def values_of(make: Callable[[], nn.Module], only: slice = slice(None), seed: int = 1) -> dict[str, torch.Tensor]:
    recorder = Recorder(seed)
    with recorder.recording():
        model = make()
    named = dict([*model.named_parameters(), *model.named_buffers()])
    shown = {name: recorder.view(tensor) for name, tensor in named.items()}
    recorder.tape.name_draws([(name, view) for name, view in shown.items() if view is not None])
    with kept_generators():
        found = {}
        for name, view in list(shown.items())[only]:
            assert view is not None
            found[name] = recorder.tape.replay(view)[0]
        return found


def test_layers_get_values_as_their_constructors_give_them() -> None:
    found, real = values_of(Layers), dict(Layers().state_dict())
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in real.items()
    }
    for name, each in real.items():
        if each.numel() > 30 and len(each.unique()) > 1:
            spread = float(each.float().std())
            assert abs(float(found[name].float().std()) - spread) <= 0.5 * spread, name
        if len(each.unique()) == 1:
            assert torch.equal(found[name], each), name
    orthogonal = found["orthogonal"]
    torch.testing.assert_close(orthogonal @ orthogonal.t(), torch.eye(5))
    assert not found["embedding.weight"][2].any()
    assert torch.equal(found["one"] * 2, found["other"])
    norm = found["weight_normed.parametrizations.weight.original1"].norm(dim=1, keepdim=True)
    torch.testing.assert_close(norm, found["weight_normed.parametrizations.weight.original0"])


def test_values_depend_on_names_and_seed_and_not_on_what_else_is_remade() -> None:
    whole = values_of(Layers)
    some = values_of(Layers, slice(3, None, 4))
    assert some
    assert all(torch.equal(whole[name], value) for name, value in some.items())
    other = values_of(Layers, seed=2)
    assert not torch.equal(whole["orthogonal"], other["orthogonal"])

    class More(Layers):
        def __init__(self) -> None:
            self.made_first = torch.randn(3)
            super().__init__()
            self.last = nn.Linear(3, 3)

        def __setattr__(self, name: str, value: object) -> None:
            object.__setattr__(self, name, value) if name == "made_first" else super().__setattr__(name, value)

    more = values_of(More)
    assert all(torch.equal(more[name], value) for name, value in whole.items())


def test_the_scripts_generators_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    values_of(Layers)
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_that_nobody_writes_is_found() -> None:
    def made() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        half, none, numbers = torch.empty(4), torch.empty(3), torch.empty(3, dtype=torch.int64)
        half[:2].normal_()
        numbers[1] = -1
        return half, none, numbers

    recorder = Recorder(0)
    with recorder.recording():
        tensors = made()
    for tensor, expected in zip(tensors, ([False, False, True, True], [True] * 3, [True, False, True]), strict=True):
        view = recorder.view(tensor)
        assert view is not None
        with kept_generators():
            _, holes = recorder.tape.replay(view)
        assert holes is not None
        assert holes.tolist() == expected


def test_recorded_tensors_say_that_they_are_where_the_code_puts_them() -> None:
    recorder = Recorder(0)
    with recorder.recording():
        made = torch.zeros(3)
        assert (made.device.type, made.is_meta, made.is_cpu) == ("cpu", False, True)
        array = made.numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    assert made.is_meta


def test_copied_modules_are_remade_too() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.Linear(3, 3)
            self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(3))

    found = values_of(Copies)
    assert torch.equal(found["layers.0.weight"], found["layers.2.weight"])
