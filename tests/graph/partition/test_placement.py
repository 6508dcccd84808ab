"""What is placed, what is recomputed, what stays together, what gets a gradient."""

from __future__ import annotations

from typing import Any

import torch
from pieces import Small, graph_of
from row_cases import words, x
from torch import Tensor

from rannd.graph.fx.aliasing import Aliases, written
from rannd.graph.model import ModelGraph


def placed_names(graph: ModelGraph) -> list[str]:
    return [node.name for node in graph.placement.placed]


def groups(graph: ModelGraph) -> list[set[str]]:
    """Groups of more than one op."""
    found: dict[int, set[str]] = {}
    for node in graph.placement.placed:
        found.setdefault(graph.placement.group[node], set()).add(node.name)
    return [names for names in found.values() if len(names) > 1]


def test_weight_transposes_are_recomputed() -> None:
    graph = graph_of(Small(lambda m, a: a @ m.w.t()), x())
    assert placed_names(graph) == ["matmul"]
    (node,) = graph.placement.placed
    assert [graph.traced.attributes[a] for a in graph.placement.attributes[node]] == ["w"]
    assert graph.task.ops[0].params


def test_masks_and_positions_are_recomputed() -> None:
    def forward(m: Any, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
        mask = (ids != 0)[:, None] & torch.ones(5, 5, dtype=torch.bool).tril()
        a = m.table(ids) + m.table(positions)
        return (a @ a.mT).masked_fill(~mask, -1.0)

    graph = graph_of(Small(forward), words())
    assert placed_names(graph) == ["embedding", "add", "m_t", "matmul", "masked_fill"]
    masked = graph.placement.placed[-1]
    assert [node.name for node in graph.placement.reads[masked]] == [graph.traced.placeholders[0].name, "matmul"]


def test_costly_ops_are_not_recomputed() -> None:
    graph = graph_of(Small(lambda m, a: (a @ a.mT).softmax(-1)), torch.randn(4, 5, 32))
    assert "matmul" in placed_names(graph)


def test_random_ops_are_not_recomputed() -> None:
    graph = graph_of(Small(lambda m, a: a @ m.w + torch.rand_like(a)), x().detach())
    assert [node.name for node in graph.placement.random] == ["rand_like"]
    assert "rand_like" in placed_names(graph)


def test_tuples_stay_with_their_readers() -> None:
    graph = graph_of(Small(lambda m, a: torch.mul(*(a @ m.w).chunk(2, 1))), x())
    assert groups(graph) == [{"chunk", "getitem", "getitem_1"}]


def test_writers_stay_with_what_shares_memory() -> None:
    def forward(m: Any, a: Tensor) -> Tensor:
        b = a @ m.w
        c = b.view(-1, 2, 3)
        c.add_(1.0)
        return (b * 2).tanh()

    graph = graph_of(Small(forward), x())
    assert groups(graph) == [{"matmul", "view", "add_"}]


def test_an_earlier_reader_stays_with_the_writer() -> None:
    def forward(m: Any, a: Tensor) -> Tensor:
        b = a @ m.w
        before = b.sum(1)
        b.mul_(2.0)
        return b.tanh() + before[:, None]

    assert groups(graph_of(Small(forward), x())) == [{"matmul", "sum_1", "mul_"}]


def test_readers_and_writers_of_a_buffer_stay_together() -> None:
    def forward(m: Any, a: Tensor) -> Tensor:
        b = a * m.count
        m.count += 1
        return (b @ m.w).tanh() + m.count

    graph = graph_of(Small(forward), x())
    assert graph.placement.written == {"count"}
    (together,) = groups(graph)
    assert {"mul", "add_"} <= together
    assert "matmul" not in together


def test_batch_norm_writes_its_buffers_in_training_only() -> None:
    model = Small(lambda m, a: m.batch_norm(a))
    buffers = {"batch_norm.running_mean", "batch_norm.running_var", "batch_norm.num_batches_tracked"}
    assert graph_of(model, x()).placement.written == buffers
    assert graph_of(model.eval(), x()).placement.written == set()


def test_regions_tell_what_they_write() -> None:
    def forward(m: Any, a: Tensor) -> Tensor:
        with torch.no_grad():
            m.running.add_(a.mean(0))
        return a @ m.w + m.running

    graph = graph_of(Small(forward), x())
    assert graph.placement.written == {"running"}


def gradients(graph: ModelGraph) -> dict[str, bool]:
    return {node.name: node in graph.placement.requires_grad for node in graph.placement.placed}


def test_gradients_flow_from_parameters_and_wanted_inputs() -> None:
    def forward(m: Any, a: Tensor) -> Any:
        return a.tanh() @ m.w, (a @ m.w).detach().exp(), (a @ m.w.t()).argmax(1)

    model = Small(forward)
    found = gradients(graph_of(model, x()))
    wanted = {"tanh", "matmul", "matmul_1", "matmul_2"}
    assert found == {name: name in wanted for name in [*wanted, "detach", "exp", "argmax"]}
    model.w.requires_grad_(False)
    found = gradients(graph_of(model, x().detach()))
    assert not any(found.values())


def test_no_gradients_without_grad_mode() -> None:
    with torch.no_grad():
        graph = graph_of(Small(lambda m, a: a @ m.w), x())
    assert graph.placement.requires_grad == set()


def test_written_tensors_get_gradients() -> None:
    def forward(m: Any, a: Tensor) -> Tensor:
        out = torch.zeros(a.shape[0], 6)
        out[:, :3] = (a @ m.w)[:, :3]
        return out.tanh()

    found = gradients(graph_of(Small(forward), x()))
    assert found["zeros"]
    assert found["tanh"]


def test_aliases_and_writes() -> None:
    def forward(m: Any, a: Tensor) -> Tensor:
        b = a @ m.w
        return b.view(-1).mul_(2.0).reshape(-1, 6) + b.tanh()

    graph = graph_of(Small(forward), x())
    sharing = Aliases(graph.traced)
    nodes = {node.name: node for node in graph.traced.graph.nodes}
    assert written(graph.traced, nodes["mul_"]) == [nodes["view"]]
    same = {name for name, node in nodes.items() if sharing.find(node) is sharing.find(nodes["matmul"])}
    assert {"matmul", "view", "mul_", "reshape"} <= same
    assert "tanh" not in same


def test_the_task_graph_says_the_same() -> None:
    model = Small(lambda m, a: m.norm((a @ m.w).tanh()) @ m.w)
    graph = graph_of(model, x())
    task = graph.task
    assert [op.target for op in task.ops] == ["aten::matmul", "aten::tanh", "aten::layer_norm", "aten::matmul"]
    assert [op.module for op in task.ops] == ["", "", "norm", ""]
    assert [task.params[number].name for number in task.ops[2].params] == ["norm.weight", "norm.bias"]
    assert task.ops[0].params == task.ops[3].params
    assert task.ops[0].flops.at(10) == 2 * 10 * 6 * 6
    made = task.values[task.ops[0].outputs[0]]
    assert made.bytes.at(10) == 10 * 6 * 4
    assert made.requires_grad
    assert task.values[task.ops[3].outputs[0]].is_output
    unused = {task.params[number].name for number in task.unused_params}
    assert {"b", "running", "lstm.weight_ih_l0"} <= unused
    assert not unused & {"w", "norm.weight", "norm.bias"}


def test_what_decides_how_memory_lies_stays_with_what_reads_it_by_strides() -> None:
    def windows(model: Small, a: Tensor) -> Tensor:
        turned = (a @ model.w).transpose(1, 2).cos()  # lies as the product does
        return turned.as_strided((len(a), 2, 6, 3), (turned.stride(0), 6, 1, 6)).sin()

    graph = graph_of(Small(windows), torch.randn(4, 5, 6))
    group = {node.name: number for node, number in graph.placement.group.items()}
    assert group["transpose"] == group["cos"] == group["as_strided"] == group["matmul"] != group["sin"]
