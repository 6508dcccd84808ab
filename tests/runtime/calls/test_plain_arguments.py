"""Strings, objects and numbers among the arguments: what no code reads costs no trace, and scaling costs one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import TraceError, UsageError
from rannd.runtime.traces import trace_provider


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each trace that is made."""
    found: list[int] = []
    trace = trace_provider.trace

    def counted(*args: Any) -> Any:
        found.append(1)
        return trace(*args)

    monkeypatch.setattr(trace_provider, "trace", counted)
    return found


class Batch(nn.Module):
    """Takes a batch as a data loader makes it."""

    def __init__(self, use: Callable[[Any, torch.Tensor], torch.Tensor] = lambda batch, x: x) -> None:
        super().__init__()
        self.first, self.last, self.use = nn.Linear(4, 4), nn.Linear(4, 4), use

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        batch = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        return self.last(torch.tanh(self.use(batch, self.first(batch["x"]))))


def run(inner: nn.Module, calls: list[dict[str, Any]], **more: Any) -> None:
    """Outputs and gradients are the model's."""
    plain = copy.deepcopy(inner)
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), 0.1))
    for call in calls:
        model.zero_grad()
        plain.zero_grad()
        found, wanted = model(call, **more), plain(call, **more)
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        found.pow(2).sum().backward()
        wanted.pow(2).sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    pyrannc.clear()


def batches(count: int = 4, **more: Any) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    return [
        {
            "x": torch.randn(rows, 4),
            "ids": [f"{number}-{row}" for row in range(rows)],
            "numbers": [100 * number + row for row in range(rows)],
            "path": Path(f"/data/{number}"),
            "meta": {"when": object(), "note": f"note {number}"},
        }
        | {name: values[number] for name, values in more.items()}
        for number, rows in zip(range(count), (3, 3, 2, 5), strict=False)
    ]


def test_ids_files_and_objects_are_not_part_of_a_call(traced: list[int]) -> None:
    run(Batch().double(), batches())
    assert len(traced) == 1


def test_a_repeated_run_with_other_ids_traces_nothing(traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CACHE", "on")
    run(Batch().double(), batches()[:2])
    run(Batch().double(), batches()[2:])
    assert len(traced) == 1


def read_mode(batch: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if batch["mode"] == "double" else x


def test_a_string_that_is_read_is_a_part_of_the_call(traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CACHE", "on")
    run(Batch(read_mode).double(), batches(mode=["double", "single", "double", "single"]))
    made = len(traced)
    assert made == 3  # the first finds out
    run(Batch(read_mode).double(), batches(mode=["double", "single", "double", "single"]))
    assert len(traced) == made


class Plain(Batch):
    """Takes what a batch consists of one by one."""

    def forward(self, x: torch.Tensor, mode: str, ids: Any = None, numbers: Any = ()) -> torch.Tensor:  # type: ignore[override]
        return super().forward({"x": x * 2 if mode == "double" else x})


@pytest.mark.parametrize("ids", [list, tuple, " ".join])
def test_a_string_that_is_read_beside_ids_that_are_not(traced: list[int], ids: Callable[[list[str]], Any]) -> None:
    net = Plain().double()
    plain, model = copy.deepcopy(net), pyrannc.RaNNCModule(net, None)
    for batch, mode in zip(batches(), ("double", "single", "double", "single"), strict=True):
        call = (batch["x"], mode, ids(batch["ids"]), batch["numbers"])
        torch.testing.assert_close(model(*call), plain(*call), rtol=1e-12, atol=1e-12)
    assert len(traced) == 3  # the first finds out
    pyrannc.clear()


def join(batch: Any, x: torch.Tensor) -> torch.Tensor:
    return x * len("".join([batch["mode"]]))  # native code


def returns_nothing_on_errors(batch: Any, x: torch.Tensor) -> torch.Tensor:
    try:
        return x * len(batch["mode"])
    except Exception:
        return x


def asks_for_the_type(batch: Any, x: torch.Tensor) -> torch.Tensor:
    return x * len(batch["mode"] * 2) if type(batch["mode"]) is str else x


@pytest.mark.parametrize("use", [join, returns_nothing_on_errors, asks_for_the_type])
def test_reads_that_are_hard_to_see(traced: list[int], use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    run(Batch(use).double(), batches(mode=["a", "bcd", "ef", "a"]))


def read_path(batch: Any, x: torch.Tensor) -> torch.Tensor:
    return x * len(str(batch["path"]))


def asks_for_the_type_of_the_path(batch: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if type(batch["path"]) is type(Path()) else x


@pytest.mark.parametrize("use", [read_path, asks_for_the_type_of_the_path])
def test_an_object_that_is_read_is_refused(use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    model = pyrannc.RaNNCModule(Batch(use).double(), None)
    with pytest.raises(UsageError, match=r"argument 0\['path'\] of the model is a pathlib"):
        model(batches()[0])
    pyrannc.clear()


class Returning(Batch):
    def forward(self, batch: dict[str, Any]) -> Any:
        return {"out": super().forward(batch), "ids": batch["ids"], "more": (batch["path"], batch["meta"])}


def test_what_the_model_returns_as_it_is_comes_back(traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CACHE", "on")
    for _ in range(2):
        model = pyrannc.RaNNCModule(Returning().double(), None)
        for batch in batches():
            found = model(batch)
            assert found["ids"] is batch["ids"]
            assert found["more"] == (batch["path"], batch["meta"])
        pyrannc.clear()
    assert len(traced) == 1


class ReturningOne(Batch):
    def forward(self, batch: dict[str, Any]) -> Any:
        return {"out": super().forward(batch), "id": batch["ids"][0], "mode": batch["mode"]}


def test_a_part_of_an_argument_that_is_returned_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    model = pyrannc.RaNNCModule(ReturningOne().double(), None)
    for number in range(4):
        batch = {"x": torch.randn(3, 4), "ids": [f"{number}-{row}" for row in range(3)], "mode": "same"}
        found = model(batch)
        assert (found["id"], found["mode"]) == (batch["ids"][0], batch["mode"])
    pyrannc.clear()
    assert capfd.readouterr().err.count("The model was traced for each value of argument 0['ids'] (") == 1
    pyrannc.clear()


# -- numbers ----------------------------------------------------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """The gradient reversal of domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alpha: float) -> torch.Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].neg() * ctx.alpha, None


USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "scale": lambda batch, x: x * batch["n"] + (1 - batch["n"]) * 0.5,
    "power": lambda batch, x: x.abs() ** batch["n"],
    "mixing": lambda batch, x: torch.lerp(x, x * 2, batch["n"]) if False else batch["n"] * x + x / (1.0 + batch["n"]),
    "function": lambda batch, x: Reversed.apply(x, batch["n"]),
    "branch": lambda batch, x: x * batch["n"] if batch["n"] < 100 else x,
    "not used": lambda batch, x: x,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("values", [[0.1, 0.2, 0.3, 1e-9], [1, 2, 3, 40]])
def test_numbers_that_only_scale_become_inputs(traced: list[int], use: str, values: list[Any]) -> None:
    run(Batch(USES[use]).double(), batches(n=values))
    assert len(traced) == 2


FIXED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "loop": lambda batch, x: sum((x for _ in range(batch["n"])), x),
    "class": lambda batch, x: x * 2 if isinstance(batch["n"], int) else x,
    "dtype": lambda batch, x: x + (torch.arange(4) * batch["n"]).double(),
}


@pytest.mark.parametrize("use", FIXED)
def test_numbers_whose_value_is_needed_stay_and_are_told_once(use: str, capfd: pytest.CaptureFixture[str]) -> None:
    run(Batch(FIXED[use]).double(), batches(n=[1, 2, 3, 4]))
    told = capfd.readouterr().err.count("The model was traced for each value of argument 0['n'] (1, 2, 3;")
    assert told == (use != "dtype")  # integers stay integers there


class Careful(Batch):
    """Refuses bad data."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        if batch["x"].abs().max() > 100:
            raise ValueError(f"bad data in {batch['ids']}")
        return super().forward(batch) * batch["n"]


def with_a_bad_batch(skipped: bool) -> None:
    model = pyrannc.RaNNCModule(Careful().double(), None)
    for number, batch in enumerate(batches(n=[0.1, 0.2, 0.3, 0.4])):
        if number == 2:
            with contextlib.nullcontext() if skipped else pytest.raises(TraceError, match="bad data in"):
                model(batch if skipped else {**batch, "x": batch["x"] * 1000})
        else:
            model(batch)
    pyrannc.clear()


def test_a_bad_batch_says_nothing_of_the_arguments(traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANNC_CACHE", "on")
    with_a_bad_batch(skipped=False)
    made = len(traced)
    assert made == 2 + 3  # each argument that might be the reason is left out once
    with_a_bad_batch(skipped=True)
    assert len(traced) == made


def by_task(batch: Any, x: torch.Tensor) -> torch.Tensor:
    for task in range(10):
        if batch["task"] == task:
            return x * task
    return x


def test_a_number_that_selects_one_of_many_branches_stays_a_part_of_the_call(capfd: pytest.CaptureFixture[str]) -> None:
    inner = Batch(by_task).double()
    model = pyrannc.RaNNCModule(inner, None)
    for task in range(10):
        call = {"x": torch.randn(3, 4), "task": task}
        torch.testing.assert_close(model(call), inner.last(torch.tanh(inner.first(call["x"].double()) * task)))
    pyrannc.clear()
    text = capfd.readouterr().err
    assert "one operator" not in text
    assert "The model was traced for each value of argument 0['task']" in text


class Scaling(nn.Linear):
    alpha = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.alpha


def test_an_attribute_that_changes_is_told_once(capfd: pytest.CaptureFixture[str]) -> None:
    inner = Scaling(4, 4)
    model = pyrannc.RaNNCModule(nn.Sequential(inner), None)
    for inner.alpha in (0.1, 0.2, 0.3, 0.4):
        model(torch.randn(3, 4))
    pyrannc.clear()
    text = capfd.readouterr().err
    assert text.count("The model was traced for each value of attribute alpha of module 0 (0.1, 0.2, 0.3;") == 1
