"""Types of values under autocast, of operators that cast inside of themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pieces import CPU, Small, signature_of
from torch import Tensor, nn
from torch.nn.functional import interpolate

from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.model import build
from rannd.graph.tracing.autocast_types import settle_types
from rannd.graph.tracing.frontend import trace


class Recurrent(nn.Module):
    """An LSTM that nothing of half precision comes before."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        return self.head(states * 2)


class Inside(Recurrent):
    """The same, with autocast entered by its own code."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            states, _ = self.lstm(x)
        return self.head((states * 2).float())


def resized(m: Small, x: Tensor) -> Tensor:
    return interpolate((x @ m.w).unsqueeze(1), scale_factor=2.0, mode="linear")


def in_half(model: nn.Module, x: Tensor) -> bool:
    """Whether a module of the model itself returns bfloat16; skips the test where this CPU cannot run the model."""
    found: list[torch.dtype] = []

    def note(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        found.append((output if isinstance(output, Tensor) else output[0]).dtype)

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        model(x)
    except RuntimeError as exc:  # oneDNN has no LSTM in bfloat16 for some CPUs, and torch nothing in its place
        if "primitive descriptor" not in str(exc):
            raise
        pytest.skip(f"torch itself cannot run this model on this CPU: {exc}")
    finally:
        for handle in handles:
            handle.remove()
    return torch.bfloat16 in found


@pytest.mark.parametrize(
    ("model", "amp", "shape"),
    [(Recurrent, True, (5, 3, 4)), (Inside, False, (5, 3, 4)), (lambda: Small(resized), True, (5, 6))],
    ids=["recurrent", "inside", "resized"],
)
def test_a_graph_has_the_types_of_its_run(model: Callable[[], nn.Module], amp: bool, shape: tuple[int, ...]) -> None:
    made, x = model(), torch.randn(shape)
    found: dict[str, torch.dtype] = {}
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        half = in_half(made, x)
        signature, tensors = signature_of(made, x)
        graph = build(made, signature, tensors, CPU)
        values = {**dict(made.named_parameters()), **dict(made.named_buffers())}
        env: dict[torch.fx.Node, object] = {}
        for node in graph.traced.graph.nodes:
            if node.op == "call_function":
                env[node] = node.target(*torch.fx.node.map_arg(node.args, env.get), **dict(node.kwargs))
            elif node.op == "placeholder":
                env[node] = x if node.name == graph.traced.placeholders[0].name else torch.ones((), dtype=torch.float64)
            elif node in graph.traced.attributes:
                env[node] = values.get(graph.traced.attributes[node])
            elif node.op == "get_attr":
                env[node] = getattr(graph.traced.root, str(node.target))
            value, run = node.meta.get("val"), env.get(node)
            if isinstance(value, TensorValue) and isinstance(run, Tensor):
                found[node.name] = run.dtype
                assert value.dtype == run.dtype, node.name
    assert (torch.bfloat16 in found.values()) >= half


def test_an_operator_without_a_kernel_for_it_leaves_types_as_they_are() -> None:
    """They are recorded, and compared when they are sent."""
    made, x = Recurrent(), torch.randn(5, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        traced, signature = trace(made, *signature_of(made, x), CPU)
        before = [node.meta.get("val") for node in traced.graph.nodes]
        next(node for node in traced.graph.nodes if node.op == "call_function").args = ("no such argument",)
        settle_types(traced, signature, CPU)
    assert [node.meta.get("val") for node in traced.graph.nodes] == before
