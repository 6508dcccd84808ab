"""A graph as people and programs read it: JSON, and DOT for Graphviz.

No torch in this file: a :class:`Drawing` is plain data. In JSON it is one object with the field names below; ops,
values, parameters, stages and blocks are numbered by their places in the lists, and a size is [c0, c1, c2], which is
c0 + c1*rows + c2*rows**2. In DOT it is drawn from the inputs down, edges tell bytes:

    inputs ──► ┌ stage 0: MERGE_0_1 ─────┐      orange   a module that runs as one operator
               │ ┌ block 0 ┐ ┌ block 1 ┐ │      grey     recomputed wherever it is read
               │ │ op ─► op├─┤► op     ├─┼──►   dashed   no gradient flows back
               │ └─────────┘ └─────────┘ │      bold     travels from stage to stage
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
    """Ops that run together."""

    name: str
    slots: tuple[int, ...]
    """The deployment's slots that run it."""
    ops: tuple[int, ...]


class DrawnBlock(msgspec.Struct, frozen=True):
    """Ops that the planner places together."""

    hash: str
    """Equal for blocks that do the same."""
    ops: tuple[int, ...]


class Recomputed(msgspec.Struct, frozen=True):
    """A cheap node that is no op of its own: every op that reads it makes it again."""

    name: str
    target: str
    recomputed: tuple[int, ...]
    """Other recomputed nodes that it reads."""
    values: tuple[int, ...]
    """Values that it reads."""
    ops: tuple[int, ...]
    """Ops that read it."""


class Argument(msgspec.Struct, frozen=True):
    """A tensor that the user gives."""

    name: str
    type: str
    shape: tuple[int, ...]
    """Without the samples' dimension where it has one."""
    batch: bool
    value: int | None
    """None where no op reads it."""


class DrawnOutput(msgspec.Struct, frozen=True):
    """A tensor or number that the user gets."""

    position: int
    """Its place among the leaves of the model's result."""
    kind: str
    """How the results of pieces are joined, see losses.Result."""
    value: int | None
    """None for numbers made of the number of rows."""


class Drawing(msgspec.Struct, frozen=True):
    """All there is to show of a graph."""

    call: str
    """The call that it is the graph of."""
    task: TaskGraph
    coupled: str | None
    """Why rows depend on each other; None where they do not."""
    stages: tuple[DrawnStage, ...]
    blocks: tuple[DrawnBlock, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[DrawnOutput, ...]
    recomputed: tuple[Recomputed, ...]
    leaves: tuple[str, ...]
    """Dotted paths of modules that run as one operator; '' is the whole model."""
    leaf_ops: frozenset[int]
    """Ops that are calls of such modules."""
    record: tuple[str, ...]
    """What the front-end did."""


def as_json(drawing: Drawing) -> bytes:
    """The drawing as one JSON object, indented."""
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
    """A struct that is stored as an array, with the names of its fields."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def as_dot(drawing: Drawing) -> str:
    """The drawing for Graphviz: ``dot -Tsvg FILE``."""
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
            if index in made_by:  # the others are weights of losses, which the runtime gives
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
    """A size in words: '16 + 24*rows'."""
    terms = ((size.c0, ""), (size.c1, "*rows"), (size.c2, "*rows^2"))
    return " + ".join(f"{factor:.12g}{power}" for factor, power in terms if factor) or "0"


def _quoted(text: str) -> str:
    """A string of DOT. Backslashes would begin an escape, line ends are written as one."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", "").replace("\n", "\\n")
    return f'"{escaped}"'
