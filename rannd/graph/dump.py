"""Write a model's graph to JSON and DOT files: option ``dump_graph``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.fx import Node

from rannd.errors import UsageError
from rannd.graph.drawing import Argument, Drawing, DrawnBlock, DrawnOutput, DrawnStage, Recomputed, as_dot, as_json
from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.sizes import is_number
from rannd.graph.fx.traced import operator_name
from rannd.graph.model import ModelGraph
from rannd.graph.partition.block_hash import block_hashes


def drawing(
    graph: ModelGraph,
    *,
    blocks: Sequence[Sequence[int]],
    stages: Sequence[tuple[str, tuple[int, ...]]],
    stage_of: Mapping[Node, int],
) -> Drawing:
    """Collect the contents of the files for `graph`.

    `blocks` are operator numbers, `stages` the name and the slots of each stage, `stage_of` maps every placed node to
    its stage.
    """
    traced, placement, task = graph.traced, graph.placement, graph.task
    value_of = {value.name: number for number, value in enumerate(task.values)}
    members: list[list[int]] = [[] for _ in stages]
    readers: dict[Node, list[int]] = {}
    for number, node in enumerate(graph.nodes.values()):
        members[stage_of[node]].append(number)
        for source in node.all_input_nodes:
            readers.setdefault(source, []).append(number)
    again = [
        node for node in traced.graph.nodes if node in placement.recomputed and not is_number(node.meta.get("val"))
    ]
    number_of = {node: number for number, node in enumerate(again)}
    return Drawing(
        call=graph.signature.describe(),
        task=task,
        coupled=graph.coupled,
        stages=tuple(DrawnStage(*stage, tuple(ops)) for stage, ops in zip(stages, members, strict=True)),
        blocks=tuple(
            DrawnBlock(digest, tuple(ops)) for digest, ops in zip(block_hashes(task, blocks), blocks, strict=True)
        ),
        arguments=tuple(
            Argument(spec.name, str(spec.dtype).removeprefix("torch."), spec.shape, spec.batch, value_of.get(node.name))
            for spec, node in zip(graph.signature.tensors, traced.placeholders, strict=False)
        ),
        outputs=tuple(
            DrawnOutput(position, result.kind, value_of.get(node.name))
            for position, result, node in zip(traced.outputs.positions, graph.results, traced.results, strict=True)
        ),
        recomputed=tuple(
            Recomputed(
                name=node.name,
                target=operator_name(node.target),
                recomputed=tuple(number_of[source] for source in node.all_input_nodes if source in number_of),
                values=tuple(value_of[source.name] for source in node.all_input_nodes if source.name in value_of),
                ops=tuple(readers.get(node, ())),
            )
            for node in again
        ),
        leaves=traced.leaf_paths,
        leaf_ops=frozenset(
            number for number, node in enumerate(graph.nodes.values()) if operator_name(node.target) == LEAF
        ),
        record=traced.record,
    )


def write(drawing: Drawing, prefix: str) -> tuple[Path, Path]:
    """Write ``<prefix><hash>.json`` and ``.dot``, each atomically; UsageError if the folder cannot be written."""
    name = f"{prefix}{drawing.task.graph_hash[:12]}"
    contents = {".json": as_json(drawing), ".dot": as_dot(drawing).encode()}
    json, dot = (_write(Path(f"{name}{kind}"), data) for kind, data in contents.items())
    return json, dot


def _write(file: Path, data: bytes) -> Path:
    file = file.expanduser().absolute()
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as temporary:
            temporary.write(data)
        Path(temporary.name).replace(file)
    except OSError as exc:
        raise UsageError(
            f"dump_graph: {file} cannot be written: {exc.strerror}; dump_graph_prefix has to begin with a folder "
            "that exists"
        ) from exc
    return file
