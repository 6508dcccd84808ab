"""Models whose parameters are on the CPU, traced as on CUDA: by fake tensors, since no GPU is needed for that.

What torch would do on CUDA is known from fake tensors, too: each graph runs on them, under the autocast of its call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cuda
import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from fake_cuda import CUDA
from pieces import CPU, graph_of, signature_of
from stages import balanced_stages
from thinned import one_in
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from zoo import ZOO, Entry

from rannd.config import Config
from rannd.config.cluster import load_cluster
from rannd.errors import TraceError
from rannd.graph.comparison import NotComparable, compare
from rannd.graph.fingerprint.fingerprint import Fingerprint, fingerprint
from rannd.graph.fx.retarget import retarget
from rannd.graph.fx.sizes import is_known, is_plain_tensor, number_at, shape_at
from rannd.graph.fx.symbolic_values import Number, TensorValue
from rannd.graph.fx.traced import Traced, attribute
from rannd.graph.model import ModelGraph, build
from rannd.graph.partition.cut import cut
from rannd.graph.partition.graph_hash import graph_hash
from rannd.graph.rows.loss_weights import counted
from rannd.graph.stored.codec import decode, encode
from rannd.graph.tracing.frontend import trace
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search.planner import plan
from rannd.profile.analytic import analytic_costs

ROWS = 3
WIDTH, CLASSES, TIME = 8, 5, 6


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.pretend(monkeypatch)
    torch.manual_seed(3)


def on_cuda(model: nn.Module, *args: Any, amp: torch.dtype | None = torch.bfloat16, **kwargs: Any) -> ModelGraph:
    """The graph of a call on CUDA, as a job has it whose script keeps everything on the CPU."""
    with fake_cuda.autocast(amp):
        signature, tensors = signature_of(model, *args, **kwargs)
        return build(model, signature, tensors, CUDA)


NO_DRIVER = torch.version.cuda is not None and not torch.accelerator.is_available()
"""A build for CUDA without a GPU: there recurrent layers ask CUDA for cuDNN's, also with fake tensors."""
RECURRENT = {torch.ops.aten.lstm.input, torch.ops.aten.gru.input}


def check(graph: ModelGraph, amp: torch.dtype | None = torch.bfloat16) -> None:
    """Values have the types, shapes and devices that torch gives them on CUDA, and none on the CPU is ever sent."""
    nodes = graph.traced.graph.nodes
    known = all(is_known(v) for n in nodes if isinstance(v := n.meta.get("val"), TensorValue))
    known = known and not (NO_DRIVER and any(node.target in RECURRENT for node in nodes))
    with FakeTensorMode(allow_non_fake_inputs=True), fake_cuda.autocast(amp):
        values: dict[Node, Any] = {}
        for node in nodes if known else ():
            if node.op == "placeholder":
                value = node.meta["val"]
                values[node] = torch.empty(shape_at(value, ROWS), dtype=value.dtype, device=CUDA)
            elif node in graph.traced.attributes:
                state = graph.traced.is_state(node)
                tensor = graph.traced.tensor(node)
                like = torch.empty_like(tensor, device=CUDA if state else tensor.device)
                values[node] = like.requires_grad_(tensor.requires_grad)
            elif node.op == "get_attr":
                values[node] = attribute(graph.traced.root, str(node.target))
            elif node.op == "call_function":
                args, kwargs = pytree.tree_map_only(Node, values.__getitem__, (node.args, node.kwargs))
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
                _check(node, node.meta["val"], values[node])
    stages = balanced_stages(graph, 3)
    for part in cut(graph.traced, graph.placement, stages, ["a", "b", "c"]):
        assert not any(node.meta["val"].host for node in (*part.inputs, *part.outputs))


def _check(node: Node, value: Any, found: Any) -> None:
    if isinstance(value, tuple):
        for each, other in zip(value, found, strict=True):
            _check(node, each, other)
    elif isinstance(value, TensorValue):
        assert isinstance(found, FakeTensor)
        assert (found.dtype, found.device.type) == (value.dtype, "cpu" if value.host else "cuda"), node.name
        assert tuple(found.shape) == shape_at(value, ROWS), node.name
    elif isinstance(value, Number):
        assert found == number_at(value, ROWS)


def _devices(traced: Traced) -> set[torch.device]:
    given = [value for node in traced.graph.nodes for value in (*node.args, *node.kwargs.values())]
    return {value for value in given if isinstance(value, torch.device)}


class Model(nn.Module):
    """A small classifier of sequences, whose middle is a function of itself and what came before."""

    def __init__(self, middle: Callable[..., Tensor]) -> None:
        super().__init__()
        self.middle = middle
        self.embed = nn.Embedding(11, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell, self.lstm_cell = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.plain = torch.arange(float(WIDTH))
        self.ignored = torch.tensor(2)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(self.embed(ids))
        logits = self.head(self.linear(self.middle(self, x, ids)))
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


def _regional(m: Model, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    with fake_cuda.autocast(dtype):
        return m.linear(x)


def _without_cache(m: Model, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.float16, cache_enabled=False):
        return m.linear(m.linear(x)).float()


def _attended(m: Model, x: Tensor) -> Tensor:
    mask = torch.full((TIME, TIME), float("-inf"), device="cpu").triu(1).to(x.device)
    return scaled_dot_product_attention(x, x, x, attn_mask=mask.to(x.dtype))


MIDDLES: dict[str, Callable[[Model, Tensor, Tensor], Tensor]] = {
    "plain": lambda m, x, ids: x.relu(),
    "positions on the device": lambda m, x, ids: x + m.embed(torch.arange(TIME, device=ids.device)),
    "positions moved": lambda m, x, ids: x + m.embed(torch.arange(TIME).to(x.device)),
    "new tensors": lambda m, x, ids: x * x.new_ones(WIDTH) + torch.zeros_like(x) + torch.rand_like(x),
    "mask from the CPU": lambda m, x, ids: _attended(m, x),
    "a number on the CPU": lambda m, x, ids: x * torch.tensor(2.0) + torch.tensor(1.5, dtype=torch.float64),
    "a constant, moved": lambda m, x, ids: x * torch.tensor([1.0, 2.0] * 4).to(x.device),
    "an attribute, moved": lambda m, x, ids: x * m.plain.to(x),
    "a buffer": lambda m, x, ids: x * m.scale,
    "to the CPU and back": lambda m, x, ids: m.linear(x).cpu().sin().to(x.device),
    "to the CPU, with gradients of CPU code": lambda m, x, ids: x * (x.float().cpu() @ torch.ones(WIDTH, 1)).to(x),
    "an index on the CPU": lambda m, x, ids: x[:, torch.tensor([5, 4, 3, 2, 1, 0])],
    "BatchNorm": lambda m, x, ids: m.batch_norm(x.transpose(1, 2)).transpose(1, 2),
    "LayerNorm": lambda m, x, ids: m.norm(x),
    "convolution": lambda m, x, ids: m.conv(x.transpose(1, 2)).transpose(1, 2),
    "attention": lambda m, x, ids: m.attention(x, x, x, need_weights=False)[0],
    "a layer of nn.Transformer": lambda m, x, ids: m.layer(x),
    "LSTM": lambda m, x, ids: m.lstm(x)[0],
    "GRU": lambda m, x, ids: m.gru(x)[0],
    "GRUCell": lambda m, x, ids: m.cell(x[:, 0], x[:, 1])[:, None] + x,
    "LSTMCell": lambda m, x, ids: m.lstm_cell(x[:, 0])[0][:, None] + x,
    "autocast inside": lambda m, x, ids: _regional(m, x.float(), torch.float16),
    "no autocast inside": lambda m, x, ids: _regional(m, x.float(), None),
    "autocast without its cache": lambda m, x, ids: _without_cache(m, x),
    "no gradients inside": lambda m, x, ids: x + torch.no_grad()(lambda: m.linear(x).cpu().to(x.device))(),
    "einsum and softmax": lambda m, x, ids: torch.einsum("bth,bsh->bts", x, x).softmax(-1) @ x,
    "a branch on the device": lambda m, x, ids: m.linear(x) if x.is_cuda else x,
}


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randint(1, 11, (rows, TIME)), torch.randint(CLASSES, (rows, TIME))


@pytest.mark.parametrize("name", one_in(20, MIDDLES))
def test_values_are_those_of_cuda(name: str) -> None:
    graph = on_cuda(Model(MIDDLES[name]), *batch())
    assert graph.traced.leaf_paths == (), graph.traced.record
    check(graph)
    linear = [node.meta["val"].dtype for node in graph.nodes.values() if node.target is torch.ops.aten.linear.default]
    assert linear[0] == linear[-1] == torch.bfloat16
    assert _devices(graph.traced) <= {CUDA, CPU}


DIFFERENT = {
    "mask from the CPU", "a constant, moved", "to the CPU and back", "an index on the CPU", "BatchNorm", "attention",
    "LSTM", "a branch on the device",
}  # fmt: skip
"""Where devices or kernels matter without autocast, too."""
assert MIDDLES.keys() >= DIFFERENT


@pytest.mark.parametrize(
    "name",
    [
        *one_in(3, sorted(DIFFERENT)),
        *(pytest.param(name, marks=pytest.mark.full) for name in MIDDLES if name not in DIFFERENT),
    ],
)
def test_without_autocast_only_devices_differ_from_the_cpu(name: str) -> None:
    graph = on_cuda(Model(MIDDLES[name]), *batch(), amp=None)
    check(graph, None)
    same = graph_of(Model(MIDDLES[name]), *batch())
    assert (graph.coupled, graph.results) == (same.coupled, same.results)
    assert (graph.label_counts is None) == (same.label_counts is None)


def test_a_loss_on_the_cpu_is_weighted_there_and_returned_there() -> None:
    class OnHost(Model):
        def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = self.head(self.embed(ids)).float().cpu()
            weight = torch.ones(CLASSES)
            loss = cross_entropy(logits.flatten(0, 1), labels.cpu().flatten(), weight, ignore_index=-100)
            return loss + cross_entropy(logits.flatten(0, 1), labels.cpu().flatten()), logits, ids

    graph = on_cuda(OnHost(MIDDLES["plain"]), *batch(), amp=None)
    check(graph, None)
    assert graph.traced.outputs.host == (0, 1)
    assert not any(node.meta["val"].host for node in graph.traced.results)
    made = [torch.zeros(shape_at(node.meta["val"], 2)) for node in graph.traced.results]
    with FakeTensorMode() as mode:
        there = [mode.from_tensor(each).to(CUDA) for each in made]
        outputs = graph.traced.outputs.unflatten(there)
    assert [each.device.type for each in outputs] == ["cpu", "cpu", "cuda"]
    assert graph.label_counts is not None
    counts = counted(graph_of(OnHost(MIDDLES["plain"]), *batch()).label_counts, batch())
    assert len(counts) == len(tuple(graph.label_counts.graph.output_node().args[0])) == 2  # type: ignore[arg-type]


def test_label_counts_read_constants_where_they_are() -> None:
    class Masked(Model):
        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            kept = (labels != self.ignored).to(torch.float32)
            return (self.head(self.embed(ids)).square().mean(-1) * kept).sum() / kept.sum()

    graph = on_cuda(Masked(MIDDLES["plain"]), *batch(), amp=None)
    check(graph, None)
    assert graph.label_counts is not None
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        (count,) = graph.label_counts(*(torch.zeros(ROWS, TIME, dtype=torch.int64, device=CUDA) for _ in range(2)))
    assert count.device.type == "cuda"
    assert [tensor.device for tensor in graph.traced.constants.values()] == [CPU]


def test_code_that_runs_on_cuda_alone_is_refused_clearly() -> None:
    """What torch refuses on CUDA is not mended by moving what the model has made on the CPU."""
    model = Model(lambda m, x, ids: x + m.plain)
    graph_of(model, *batch())
    with pytest.raises(TraceError, match=r"running it on cuda, and torch sees no such device here: .*device c.*cuda:0"):
        on_cuda(model, *batch())
    with pytest.raises(TraceError, match=r"cuda, and torch sees no such device here: .*numpy"):
        on_cuda(Model(lambda m, x, ids: x * float(np.random.rand())), *batch())
    graph = on_cuda(Model(MIDDLES["plain"]), *batch())
    with pytest.raises(NotComparable, match="torch sees no cuda device here"):
        compare(Model(MIDDLES["plain"]), graph, batch())


class Cubed(torch.autograd.Function):
    """As user code writes Functions for autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradients[0]


def test_sequences_of_different_lengths_have_to_run_once() -> None:
    def packed(m: Model, x: Tensor, ids: Tensor) -> Tensor:
        lengths = (ids > 0).sum(1).clamp(min=1).cpu()
        found = nn.utils.rnn.pack_padded_sequence(x.float(), lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(m.lstm(found)[0], batch_first=True, total_length=TIME)[0]

    with pytest.raises(TraceError, match="running it on cuda"):
        on_cuda(Model(packed), *batch())


def test_a_custom_function_has_to_run_once() -> None:
    model = Model(lambda m, x, ids: Cubed.apply(x))  # type: ignore[no-untyped-call]
    with pytest.raises(TraceError, match=r"running it on cuda, .*autograd.Function .*Cubed"):
        on_cuda(model, *batch())
    (function,) = graph_of(model, *batch()).traced.leaf_paths
    assert "Cubed" in function


def test_a_stored_trace_keeps_devices_without_ordinals() -> None:
    model = Model(MIDDLES["to the CPU, with gradients of CPU code"])
    with fake_cuda.autocast():
        signature, tensors = signature_of(model, *batch())
        traced, signature = trace(model, signature, tensors, CUDA)
        data = encode(traced, None)
        other = torch.device("cuda", 3)
        stored = retarget(decode(data, model)[0], other)
        assert graph_hash(stored, signature, model) == graph_hash(retarget(traced, CUDA), signature, model)
        loaded = build(model, signature, tensors, other, decode(data, model)[0])
        fresh = build(model, signature, tensors, other)
    assert loaded.task == fresh.task
    named = {
        v for node in stored.graph.nodes for v in (*node.args, *node.kwargs.values()) if isinstance(v, torch.device)
    }
    assert named == {other, CPU}
    values = [node.meta.get("val") for node in traced.graph.nodes]
    assert [node.meta.get("val") for node in decode(data, model)[0].graph.nodes] == values
    assert any(isinstance(value, TensorValue) and value.host for value in values)


def test_the_device_of_the_job_is_part_of_a_traces_key() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    signature, _ = signature_of(model, torch.ones(3, 2))
    found = [fingerprint(model, signature, device) for device in (CPU, CUDA, torch.device("cuda", 1))]
    assert all(isinstance(each, Fingerprint) for each in found)
    assert found[0] != found[1] == found[2]


def test_the_model_is_as_before() -> None:
    model = Model(MIDDLES["BatchNorm"]).train()
    before = {
        name: (id(tensor), tensor.device, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()
    }
    on_cuda(model, *batch())
    for name, tensor in model.state_dict(keep_vars=True).items():
        identity, device, value = before[name]
        assert (id(tensor), tensor.device) == (identity, device)
        assert torch.equal(tensor, value)


FEW = {"gpt2", "vit", "tied", "nested inputs", "experts, looped"}
LEAVES = {
    "bloom", "detr", "wav2vec2", "hubert", "informer", "autograd.Function", "control flow",
    "BatchNorm", "mixtral, looped",
}  # fmt: skip
"""They have code that has to run to be traced, which needs a device."""
CPU_ONLY = {"einsum attention", "lstm, packed", "experts, scattered"}
"""Models that fail on CUDA, or under its autocast, in PyTorch as well."""


@pytest.mark.parametrize(
    "entry", [pytest.param(e, marks=() if e.name in FEW else pytest.mark.full) for e in ZOO], ids=str
)
def test_the_zoo_is_traced_as_on_cuda(entry: Entry) -> None:
    model, call = entry.build(), entry.batch(4)
    if entry.name in LEAVES | CPU_ONLY:
        with pytest.raises(TraceError, match="torch sees no such device here"):
            on_cuda(model, **call)
        return
    graph = on_cuda(model, **call)
    check(graph)
    assert any(node.meta["val"].dtype == torch.bfloat16 for node in graph.nodes.values() if is_plain_tensor(node))


def test_a_plan_with_the_costs_of_a_cluster() -> None:
    entry = next(each for each in ZOO if each.name == "gpt2")
    graph = on_cuda(entry.build(), **entry.batch(4))
    cluster, options = load_cluster("a100x8"), PlanOptions.of(Config())
    blocks = make_blocks(Partitioning.of(graph.task), options, world=4)
    costs = analytic_costs(graph.task, [block.ops for block in blocks], cluster, fewest=1, most=4, nodes=1)
    slots = tuple(Slot(*place) for place in cluster.places(4))
    made = plan(graph.task, blocks, costs, world=4, slots=slots, batch_rows=16, memory_bytes=2**30, options=options)
    assert made.graph_hash == graph.task.graph_hash
    assert sum(len(stage.ops) for stage in made.stages) == len(graph.task.ops)
    assert {op.dtype for op in graph.task.ops if op.target == "aten::linear"} == {"bfloat16"}
