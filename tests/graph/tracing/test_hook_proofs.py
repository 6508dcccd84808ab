"""The tracer's hooks into torch prove themselves; where one is not run, no graph is trusted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch
from leaf_models import WIDTH, Between, Function
from pieces import graph_of
from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils.hooks import RemovableHandle

from rannd.graph.tracing import hook_proofs
from rannd.graph.tracing.hook_proofs import assume, failing
from rannd.patches import GlobalHook


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    hook_proofs._known.clear()
    yield
    hook_proofs._known.clear()
    assert not global_hooks._global_forward_pre_hooks
    assert not global_hooks._global_forward_hooks


def test_this_torch_runs_all_hooks() -> None:
    assert failing() == ()


@pytest.mark.parametrize("name", sorted(hook_proofs._PROOFS))
def test_a_hook_that_is_not_run_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hook itself switched off, its proof fails: it can."""
    switch_off(name, monkeypatch)
    found = [each for each in failing() if each.startswith(name)]
    assert found
    assert not any("TypeError" in each or "AttributeError" in each for each in found), "the test fails, not the proof"


def switch_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a hook of the tracer do nothing, as if torch did not run it."""
    from contextlib import contextmanager

    from rannd.graph.branches import data_dependent
    from rannd.graph.fx import fx_names
    from rannd.graph.modules import autograd_functions, foreign_rng, source_location

    @contextmanager
    def nothing(*args: object, **kwargs: object) -> Iterator[None]:
        yield

    if name.startswith("a custom"):
        monkeypatch.setattr(source_location, "watched_nodes", nothing)
    elif name.startswith("the forward"):
        monkeypatch.setattr(autograd_functions, "_applies", nothing)
    elif name.startswith("hooks for") or name == "inference_mode":
        monkeypatch.setattr(hook_proofs, "watch_gradients", nothing)
    elif name == "nodes of the autograd graph":
        monkeypatch.setattr(
            source_location.NodesUnseen, "__torch_function__", lambda _, f, t, a=(), k=None: f(*a, **(k or {}))
        )
    elif name == "registered operators":
        monkeypatch.setattr(hook_proofs, "watch_cpp_functions", lambda model: source_location.NodesUnseen(model))
        monkeypatch.setattr(source_location.NodesUnseen, "__torch_function__", _offended)
    elif name == "branches on tensors":
        monkeypatch.setattr(data_dependent, "_TRUTHS", ())
        monkeypatch.setattr(data_dependent, "_NUMBERS", ())
    elif name == "branches on unknown sizes":
        monkeypatch.setattr(data_dependent, "of_torch", lambda _: True)
    elif name.startswith("random numbers"):
        hook = GlobalHook("none", lambda _: RemovableHandle(OrderedDict()), "a test")
        monkeypatch.setattr(foreign_rng, "MODULE_LEFT", hook)
    elif name.startswith("checkpoints"):
        monkeypatch.setattr(hook_proofs, "no_checkpoints", nothing)
        if name == "checkpoints":
            monkeypatch.setattr(hook_proofs, "checkpoint", _cloned)
    elif name == "arguments of distributions":
        monkeypatch.setattr(hook_proofs, "unvalidated", nothing)
    elif name == "names of attributes":
        monkeypatch.setattr(fx_names, "_format_target", torch.fx.graph._format_target)
    elif name == "dropout":
        monkeypatch.setattr(hook_proofs, "forced", nothing)
    elif name == "devices of tensors":
        monkeypatch.setattr(hook_proofs, "seen_on", nothing)
    elif name == "random operators":
        monkeypatch.setattr(hook_proofs, "is_random_operator", lambda _: False)
    else:
        raise AssertionError(f"nothing is known of {name}")


def _offended(mode: object, *args: object) -> None:
    from rannd.graph.modules.source_location import Offence, SourceLocation

    raise Offence("offends", SourceLocation(("",), ""))


def _cloned(function: object, a: torch.Tensor, **kwargs: object) -> torch.Tensor:
    """As torch 2.11 does, which makes nodes of its own."""
    return a.clone()


def test_without_a_hook_the_whole_model_is_an_operator() -> None:
    assume(("nodes of the autograd graph",))
    graph = graph_of(Between(Function()), torch.randn(4, WIDTH))
    assert graph.traced.leaf_paths == ("",)
    assert "nodes of the autograd graph" in graph.traced.record[0]
    assert torch.__version__ in graph.traced.record[0]


def test_what_another_process_found_is_taken_over() -> None:
    assume(())
    graph = graph_of(nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH))
    assert graph.traced.leaf_paths == ()
