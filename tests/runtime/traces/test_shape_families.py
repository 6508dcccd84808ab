"""Sequence lengths share traces: two traces serve all lengths of a model, and two those of each branch of its code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from rannd.runtime.traces import shape_families, trace_provider


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each trace that is made."""
    found: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            found.append(name)
            return function(*args)

        return counting

    monkeypatch.setattr(trace_provider, "trace", counted("sizes", trace_provider.trace))
    monkeypatch.setattr(shape_families, "template", counted("template", shape_families.template))
    return found


def same_as_plain(inner: nn.Module, calls: list[tuple[torch.Tensor, ...]]) -> None:
    plain = copy.deepcopy(inner)
    model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), 0.1))
    for call in calls:
        torch.testing.assert_close(model(*call), plain(*call), rtol=1e-10, atol=1e-10)
    model(*calls[-1]).sum().backward()
    plain(*calls[-1]).sum().backward()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-10)
    pyrannc.clear()


class Translator(nn.Module):
    """As torch's tutorial: the caller makes the masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, mask: torch.Tensor, here: torch.Tensor, there: torch.Tensor
    ) -> torch.Tensor:
        result: torch.Tensor = self.body(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=mask,
            src_key_padding_mask=here,
            tgt_key_padding_mask=there,
            memory_key_padding_mask=here,
        )
        return result


def sentences(length: int, other: int, rows: int = 3) -> tuple[torch.Tensor, ...]:
    source, target = torch.randint(1, 30, (rows, length)), torch.randint(1, 30, (rows, other))
    mask = nn.Transformer.generate_square_subsequent_mask(other, dtype=torch.float64)
    padded = torch.zeros(rows, other)
    padded[0, -1] = float("-inf") if other > 2 else 0.0
    return source, target, mask, torch.zeros(rows, length).double(), padded.double()


@pytest.mark.long
def test_lengths_of_an_encoder_decoder_share_traces(traced: list[str]) -> None:
    torch.manual_seed(0)
    lengths = [(9, 9), (7, 8), (12, 5), (6, 6), (8, 11), (20, 4)]
    same_as_plain(Translator().double(), [sentences(*each) for each in lengths])
    assert traced == ["sizes", "template"]


@pytest.mark.long
def test_lengths_of_greedy_decoding_share_traces(traced: list[str]) -> None:
    """From one token on; the target is as long as the batch at length 3."""
    torch.manual_seed(0)
    same_as_plain(Translator().double(), [sentences(9, length) for length in range(1, 9)])
    assert traced.count("sizes") <= 3
    assert traced.count("template") <= 2


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if mask.any():
            x = x.masked_fill(mask.unsqueeze(-1), 0.0)
        return x


def test_each_branch_has_a_trace_for_all_lengths(traced: list[str]) -> None:
    torch.manual_seed(0)
    calls = []
    for length in (5, 7, 6, 9, 8, 4):
        x, mask = torch.randn(3, length, 4).double(), torch.zeros(3, length, dtype=torch.bool)
        calls += [(x, mask), (x, mask | (torch.arange(length) == 1))]
    same_as_plain(Branching().double(), calls)
    assert traced.count("sizes") <= 2
    assert traced.count("template") == 2


def test_attempts_to_share_a_trace_end_where_each_length_has_its_own_graph(traced: list[str]) -> None:
    class Uneven(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * sum(range(int(x.shape[1])))  # a loop over the length: another graph for each

    torch.manual_seed(0)
    same_as_plain(Uneven(4, 4).double(), [(torch.randn(3, length, 4).double(),) for length in (5, 6, 7, 8, 9)])
    assert traced.count("sizes") == 5
    assert traced.count("template") <= shape_families.MOST_FAILURES
