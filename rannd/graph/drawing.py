"""Export a graph as JSON, and as DOT for Graphviz.

No torch in this file: a :class:`Drawing` is plain data. The JSON file is one object with the field names below;
operators, values, parameters, stages and blocks are numbered by their list positions, and a size is [c0, c1, c2],
meaning c0 + c1*rows + c2*rows**2. In DOT the graph runs from the inputs down, with bytes as edge labels:

    inputs ──► ┌ stage 0: MERGE_0_1 ─────┐      orange   opaque module that runs as one operator
               │ ┌ block 0 ┐ ┌ block 1 ┐ │      grey     recomputed by every reader
               │ │ op ─► op├─┤► op     ├─┼──►   dashed   no gradient flows back
               │ └─────────┘ └─────────┘ │      bold     sent from stage to stage
               └─────────────────────────┘ ──► outputs
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from rannd.graph.fx.ir import Size, TaskGraph

_LEAF = "orange"
_RECOMPUTED = "grey80"
_STAGES = ("lightblue1", "palegreen1", "lightyellow1", "mistyrose1", "lavender", "honeydew2")


class DrawnStage(msgspec.Struct, frozen=True):
    """A pipeline stage."""

    name: str
    slots: tuple[int, ...]
    """Slots of the deployment that run it."""
    ops: tuple[int, ...]


class DrawnBlock(msgspec.Struct, frozen=True):
    """A block of operators that the planner places as a unit."""

    hash: str
    """Structural hash, equal for equal blocks."""
    ops: tuple[int, ...]


class Recomputed(msgspec.Struct, frozen=True):
    """A cheap node that is recomputed by every operator that reads it."""

    name: str
    target: str
    recomputed: tuple[int, ...]
    """Other recomputed nodes that it reads."""
    values: tuple[int, ...]
    """Values that it reads."""
    ops: tuple[int, ...]
    """Operators that read it."""


class Argument(msgspec.Struct, frozen=True):
    """A tensor argument of the call."""

    name: str
    type: str
    shape: tuple[int, ...]
    """Without the batch dimension, if it has one."""
    batch: bool
    value: int | None
    """Number of its value, None if no operator reads it."""


class DrawnOutput(msgspec.Struct, frozen=True):
    """A tensor or number in the model's result."""

    position: int
    """Leaf index in the model's result."""
    kind: str
    """How the results of microbatches are combined, see loss_weights.Result."""
    value: int | None
    """Number of its value, None for numbers computed from the number of rows."""


class Drawing(msgspec.Struct, frozen=True):
    """Contents of the exported files."""

    call: str
    """Description of the call that the graph is for."""
    task: TaskGraph
    coupled: str | None
    """Why rows depend on each other; None if they do not."""
    stages: tuple[DrawnStage, ...]
    blocks: tuple[DrawnBlock, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[DrawnOutput, ...]
    recomputed: tuple[Recomputed, ...]
    leaves: tuple[str, ...]
    """Dotted paths of opaque modules; '' is the whole model."""
    leaf_ops: frozenset[int]
    """Operators that are calls of opaque modules."""
    record: tuple[str, ...]
    """Log of the tracing front-end."""


def as_json(drawing: Drawing) -> bytes:
    """Encode the drawing as one indented JSON object."""
    task = drawing.task
    stage_of = {op: number for number, stage in enumerate(drawing.stages) for op in stage.ops}
    block_of = {op: number for number, block in enumerate(drawing.blocks) for op in block.ops}
    unused = set(task.unused_params)
    told = {
        "graph_hash": task.graph_hash,
        "call": drawing.call,
        "rows_coupled": drawing.coupled,
        "record": drawing.record,
        "leaves": drawing.leaves,
        "arguments": drawing.arguments,
        "outputs": drawing.outputs,
        "stages": drawing.stages,
        "blocks": drawing.blocks,
        "ops": [
            {
                **_named(op),
                "stage": stage_of[number],
                "block": block_of[number],
                "leaf": number in drawing.leaf_ops,
            }
            for number, op in enumerate(task.ops)
        ],
        "values": [_named(value) for value in task.values],
        "params": [{**_named(param), "unused": number in unused} for number, param in enumerate(task.params)],
        "recomputed": drawing.recomputed,
    }
    return msgspec.json.format(msgspec.json.encode(told), indent=1)


def _named(struct: msgspec.Struct) -> dict[str, object]:
    """Convert an array-like struct to a dict with its field names."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def as_dot(drawing: Drawing) -> str:
    """Write the drawing in DOT, for ``dot -Tsvg FILE``."""
    return "\n".join(_dot(drawing)) + "\n"


def _dot(drawing: Drawing) -> Iterator[str]:
    task = drawing.task
    stage_of = {op: number for number, stage in enumerate(drawing.stages) for op in stage.ops}
    block_of = {op: number for number, block in enumerate(drawing.blocks) for op in block.ops}
    yield f"digraph {_quoted(task.graph_hash)} {{"
    yield f"  label={_quoted(drawing.call)}; labelloc=t; compound=true; newrank=true;"
    yield "  node [shape=box, style=filled, fillcolor=white, fontsize=10]; edge [fontsize=9];"
    for number, argument in enumerate(drawing.arguments):
        shape = ", ".join([*(["rows"] if argument.batch else []), *map(str, argument.shape)])
        label = f"{argument.name}\n{argument.type}({shape})"
        yield f"  in{number} [label={_quoted(label)}, shape=ellipse];"
    for number, stage in enumerate(drawing.stages):
        yield f"  subgraph cluster_{number} {{"
        slots = ", ".join(map(str, stage.slots))
        yield f"    label={_quoted(f'stage {number}: {stage.name}, slots {slots}')};"
        yield f"    style=filled; color={_STAGES[number % len(_STAGES)]};"
        inside: dict[int, list[int]] = {}
        for each in sorted(stage.ops):
            inside.setdefault(block_of[each], []).append(each)
        for block, ops in inside.items():
            label = f"block {block} ({drawing.blocks[block].hash[:8]})"
            yield f"    subgraph cluster_{number}_{block} {{"
            yield f"      label={_quoted(label)}; style=solid; color=grey40;"
            for each in ops:
                colour = f", fillcolor={_LEAF}" if each in drawing.leaf_ops else ""
                yield f"      op{each} [label={_quoted(_label(drawing, each))}{colour}];"
            yield "    }"
        yield "  }"
    made_by = {value: f"op{number}" for number, op in enumerate(task.ops) for value in op.outputs}
    made_by |= {arg.value: f"in{number}" for number, arg in enumerate(drawing.arguments) if arg.value is not None}
    for number, op in enumerate(task.ops):
        for index in op.inputs:
            if index in made_by:  # the others are loss weights, which the runtime provides
                value = task.values[index]
                style = "" if value.requires_grad else ", style=dashed"
                if value.producer >= 0 and stage_of[value.producer] != stage_of[number]:
                    style += ", penwidth=3"
                yield f"  {made_by[index]} -> op{number} [label={_quoted(size_text(value.bytes))}{style}];"
    for number, node in enumerate(drawing.recomputed):
        label = f"{node.target}\n{node.name}"
        yield f"  again{number} [label={_quoted(label)}, fillcolor={_RECOMPUTED}];"
        sources = [f"again{other}" for other in node.recomputed]
        sources += [made_by[value] for value in node.values if value in made_by]
        for source in sources:
            yield f"  {source} -> again{number} [style=dashed, color={_RECOMPUTED}];"
        for reader in node.ops:
            yield f"  again{number} -> op{reader} [style=dashed, color={_RECOMPUTED}];"
    for number, output in enumerate(drawing.outputs):
        yield f"  out{number} [label={_quoted(f'output {output.position}: {output.kind}')}, shape=ellipse];"
        if output.value is not None:
            size = _quoted(size_text(task.values[output.value].bytes))
            yield f"  {made_by[output.value]} -> out{number} [label={size}];"
    yield "}"


def _label(drawing: Drawing, number: int) -> str:
    op = drawing.task.ops[number]
    held = sum(drawing.task.params[index].bytes for index in op.params)
    lines = [op.name, op.module, f"{held} bytes of parameters" if held else ""]
    return "\n".join(line for line in lines if line)


def size_text(size: Size) -> str:
    """A size as text: '16 + 24*rows'."""
    terms = ((size.c0, ""), (size.c1, "*rows"), (size.c2, "*rows^2"))
    return " + ".join(f"{factor:.12g}{power}" for factor, power in terms if factor) or "0"


def _quoted(text: str) -> str:
    """Quote a DOT string: backslashes and quotes are escaped, line ends become \\n."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "").replace("\n", "\\n")
    return f'"{escaped}"'
