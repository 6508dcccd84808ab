"""dump_graph's files: JSON that says all there is to know of a graph, DOT that Graphviz reads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from pieces import Small, graph_of
from torch import Tensor, nn

from rannd.errors import UsageError
from rannd.graph.drawing import Drawing, as_dot, as_json, size_text
from rannd.graph.dump import drawing, write
from rannd.graph.fx.ir import Size
from rannd.graph.model import ModelGraph


class Counted(nn.Module):
    """A leaf: its code depends on what is in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w if x.sum().item() > 0 else x + self.w


class Shown(nn.Module):
    """Two layers, a mask that is made again where it is read, a leaf, an unused parameter and an unused input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.leaf = Counted()
        self.never = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, ids: Tensor, other: Tensor) -> dict[str, Any]:
        mask = (ids > 0)[:, None]
        for layer in self.layers:
            x = layer(x) * mask
        return {"out": self.leaf(x), "rows": x.shape[0], "loss": x.sum()}


def shown(*, stages: int = 2) -> tuple[ModelGraph, Drawing]:
    graph = graph_of(Shown(), x=torch.randn(4, 6), ids=torch.ones(4, dtype=torch.int64), other=torch.randn(4))
    count = len(graph.task.ops)
    first = next(n for n, op in enumerate(graph.task.ops) if op.module == "layers.1")
    blocks = [list(range(first)), list(range(first, count - 1)), [count - 1]]
    ends = [first, count] if stages == 2 else [count]
    stage_of = {node: sum(n >= end for end in ends) for n, node in enumerate(graph.nodes.values())}
    names = [(f"MERGE_{n}", (n,)) for n in range(stages)]
    return graph, drawing(graph, blocks=blocks, stages=names, stage_of=stage_of)


def test_the_json_says_all() -> None:
    graph, drawn = shown()
    told = json.loads(as_json(drawn))
    task = graph.task
    assert told["graph_hash"] == task.graph_hash
    assert "x float32(B, 6)" in told["call"]
    assert told["leaves"] == ["leaf"]
    assert any("leaf" in line for line in told["record"])
    assert told["rows_coupled"] == graph.coupled
    for number, (op, mine) in enumerate(zip(told["ops"], task.ops, strict=True)):
        assert (op["name"], op["target"], op["hash"], op["module"]) == (mine.name, mine.target, mine.hash, mine.module)
        assert tuple(op["inputs"]) == mine.inputs
        assert tuple(op["outputs"]) == mine.outputs
        assert number in told["stages"][op["stage"]]["ops"]
        assert number in told["blocks"][op["block"]]["ops"]
        assert op["leaf"] == (op["target"] == "rannd::leaf")
    assert sum(op["leaf"] for op in told["ops"]) == 1
    for value, own in zip(told["values"], task.values, strict=True):
        assert value["name"] == own.name
        assert Size(*value["bytes"]) == own.bytes
    assert {param["name"]: param["unused"] for param in told["params"]}["never"]
    assert [argument["name"] for argument in told["arguments"]] == ["ids", "other", "x"]
    assert [argument["value"] is None for argument in told["arguments"]] == [False, True, False]
    kinds = {output["position"]: output["kind"] for output in told["outputs"]}
    assert kinds == {0: "first", 1: "number", 2: "global"}  # nobody knows what the leaf does with rows
    assert len({block["hash"] for block in told["blocks"]}) == 3
    assert [stage["slots"] for stage in told["stages"]] == [[0], [1]]


def test_what_is_made_again_is_told_with_its_readers() -> None:
    _, drawn = shown()
    told = json.loads(as_json(drawn))
    mask = next(node for node in told["recomputed"] if node["ops"])
    assert [told["ops"][op]["target"] for op in mask["ops"]] == ["aten::mul.Tensor"] * 2
    (before,) = mask["recomputed"]
    assert told["recomputed"][before]["ops"] == []
    first = next(node for node in told["recomputed"] if node["target"] == "aten::gt.Scalar")
    (value,) = first["values"]
    assert told["values"][value]["producer"] == -1


# -- DOT: a reader of the part of the grammar that is written --------------------------------------------------

_TOKEN = re.compile(r'\s*(?:(->|[{}\[\];=,])|("(?:[^"\\]|\\.)*")|([A-Za-z_][A-Za-z_0-9]*|-?[0-9.]+))', re.DOTALL)


def tokens(text: str) -> Iterator[str]:
    at = 0
    text = text.rstrip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        assert found is not None, f"no DOT: {text[at : at + 40]!r}"
        at = found.end()
        yield found.group().strip()


class Dot:
    """Nodes with the clusters that they are in, and edges, of a DOT text."""

    def __init__(self, text: str) -> None:
        self._tokens = list(tokens(text))
        self._at = 0
        self.nodes: dict[str, dict[str, str]] = {}
        self.inside: dict[str, tuple[str, ...]] = {}
        self.edges: list[tuple[str, str, dict[str, str]]] = []
        self.clusters: dict[str, dict[str, str]] = {}
        assert self._next() == "digraph"
        self._next()
        self._body(())
        assert self._at == len(self._tokens)

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _body(self, around: tuple[str, ...]) -> None:
        assert self._next() == "{"
        while (first := self._next()) != "}":
            if first == ";":
                continue
            if first == "subgraph":
                name = self._next()
                assert name not in self.clusters
                self.clusters[name] = {}
                self._body((*around, name))
                continue
            after = self._next()
            if after == "=":
                value = self._next()
                if around:
                    self.clusters[around[-1]][first] = value
            elif after == "->":
                second = self._next()
                assert self._next() == "["
                self.edges.append((first, second, self._attributes()))
            else:
                assert after == "["
                found = self._attributes()
                if first not in ("node", "edge"):
                    assert first not in self.nodes
                    self.nodes[first] = found
                    self.inside[first] = around

    def _attributes(self) -> dict[str, str]:
        found = {}
        while (name := self._next()) != "]":
            if name == ",":
                continue
            assert self._next() == "="
            found[name] = self._next()
        return found


def test_the_dot_has_all_in_its_frames() -> None:
    graph, drawn = shown()
    dot = Dot(as_dot(drawn))
    told = json.loads(as_json(drawn))
    for number, op in enumerate(told["ops"]):
        stage, block = op["stage"], op["block"]
        assert dot.inside[f"op{number}"] == (f"cluster_{stage}", f"cluster_{stage}_{block}")
        assert op["name"] in dot.nodes[f"op{number}"]["label"]
        assert ("fillcolor" in dot.nodes[f"op{number}"]) == op["leaf"]
    assert all(first in dot.nodes and second in dot.nodes for first, second, _ in dot.edges)
    drawn_edges = {(first, second): attributes for first, second, attributes in dot.edges}
    crossing = 0
    for number, op in enumerate(graph.task.ops):
        for index in op.inputs:
            value = graph.task.values[index]
            if value.producer < 0:
                continue
            edge = drawn_edges[f"op{value.producer}", f"op{number}"]
            assert edge["label"] == f'"{size_text(value.bytes)}"'
            assert ("style" in edge) == (not value.requires_grad)
            far = told["ops"][value.producer]["stage"] != told["ops"][number]["stage"]
            assert ("penwidth" in edge) == far
            crossing += far
    assert crossing == 1
    again = [name for name, attributes in dot.nodes.items() if attributes.get("fillcolor") == "grey80"]
    assert len(again) == len(told["recomputed"]) > 0
    assert sum(name.startswith("out") for name in dot.nodes) == 3
    assert "MERGE_1" in dot.clusters["cluster_1"]["label"]


def test_a_block_over_two_stages_has_a_frame_in_each() -> None:
    graph, _ = shown()
    count = len(graph.task.ops)
    stage_of = {node: int(n >= count // 2) for n, node in enumerate(graph.nodes.values())}
    drawn = drawing(graph, blocks=[range(count)], stages=[("a", (0,)), ("b", (1, 2))], stage_of=stage_of)
    dot = Dot(as_dot(drawn))
    assert {"cluster_0_0", "cluster_1_0"} <= set(dot.clusters)
    assert "slots 1, 2" in dot.clusters["cluster_1"]["label"]


def test_any_name_can_be_drawn() -> None:
    graph, drawn = shown()
    task = drawn.task
    odd = msgspec.structs.replace(task.ops[0], module='a "b"\n{c} é \\')
    drawn = msgspec.structs.replace(
        drawn,
        task=msgspec.structs.replace(task, ops=(odd, *task.ops[1:])),
        stages=(msgspec.structs.replace(drawn.stages[0], name='"];\n'), drawn.stages[1]),
        arguments=tuple(msgspec.structs.replace(each, name='x"\\ y') for each in drawn.arguments),
    )
    dot = Dot(as_dot(drawn))
    assert dot.nodes["in2"]["label"] == r'"x\"\\ y\nfloat32(rows, 6)"'
    assert dot.clusters["cluster_0"]["label"] == r'"stage 0: \"];\n, slots 0"'
    assert r"a \"b\"\n{c} é \\" in dot.nodes["op0"]["label"]
    told = json.loads(as_json(drawn))
    assert told["arguments"][0]["name"] == 'x"\\ y'
    assert told["ops"][0]["module"] == odd.module
    assert len(told["ops"]) == len(graph.task.ops)


def test_weights_of_losses_need_no_node() -> None:
    """They are values that the runtime gives, not the user."""
    graph = graph_of(Small(lambda m, x: ((x @ m.w) ** 2).mean()), torch.randn(4, 6))
    assert graph.weights
    drawn = drawing(
        graph,
        blocks=[range(len(graph.task.ops))],
        stages=[("all", (0,))],
        stage_of=dict.fromkeys(graph.nodes.values(), 0),
    )
    dot = Dot(as_dot(drawn))
    assert all(first in dot.nodes and second in dot.nodes for first, second, _ in dot.edges)


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it() -> None:
    _, drawn = shown()
    done = subprocess.run(["dot", "-Tsvg"], input=as_dot(drawn).encode(), capture_output=True, check=True)
    assert b"</svg>" in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("size", "text"),
    [(Size(), "0"), (Size(16), "16"), (Size(16, 24), "16 + 24*rows"), (Size(0, 0, 2), "2*rows^2")],
)
def test_sizes_in_words(size: Size, text: str) -> None:
    assert size_text(size) == text


def test_files_are_whole_and_named_by_the_hash(tmp_path: Path) -> None:
    graph, drawn = shown()
    files = write(drawn, str(tmp_path / "graph-"))
    name = f"graph-{graph.task.graph_hash[:12]}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.dot", f"{name}.json"]
    assert files[0].read_bytes() == as_json(drawn)
    assert files[1].read_text() == as_dot(drawn)
    write(drawn, str(tmp_path / "graph-"))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    _, drawn = shown()
    with pytest.raises(UsageError, match=r"dump_graph: \S*none/g-\w+\.json cannot be written: No such file"):
        write(drawn, str(tmp_path / "none" / "g-"))


def test_large_graphs_are_drawn() -> None:
    """A few thousand ops; what takes time in the square of them would run into the limit of all tests."""

    def many(model: Small, x: Tensor) -> Tensor:
        for _ in range(700):
            x = torch.relu(x @ model.w) + model.b
        return x

    graph = graph_of(Small(many), torch.randn(4, 6))
    count = len(graph.task.ops)
    blocks = [range(n, min(n + 7, count)) for n in range(0, count, 7)]
    drawn = drawing(graph, blocks=blocks, stages=[("all", (0,))], stage_of=dict.fromkeys(graph.nodes.values(), 0))
    assert len(as_dot(drawn)) > 1000 * 20
    assert len(as_json(drawn)) > 1000 * 20
