"""Writes the page of a plan: one file of HTML with all that it needs, which asks no network for anything.

The form is `page.html` with `page.css` and `page.js` beside it. The data is JSON in a script element that no browser
runs; `<`, `>` and `&` are escaped in it, so no text can end the element. A content security policy allows this style
and this script alone, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from rannd.plan.compatibility import plain
from rannd.plan.deployment import Deployment
from rannd.plan.measured_step import MeasuredStep
from rannd.plan.plan_text import devices_text, show, show_measured, title
from rannd.runner.page.layer_folding import folded
from rannd.runner.page.page_data import ComparedPlan, Ops, PageStage, PlanPage, Timeline
from rannd.runner.page.page_timeline import measured_timeline, predicted, predicted_timeline, slot_uses
from rannd.runner.page.plan_difference import against
from rannd.runner.page.plan_verdict import MEMORY_NAMES, costs, edges, memory, verdict

MOST_BYTES = 2_000_000
"""Of a page."""
_SIZES = ((20_000, 4000), (10_000, 1000), (5000, 500), (2000, 200), (500, 100), (0, 0))
"""Numbers of operators, and of layers, that are listed: the first with which the page is small enough."""
_FEW = 100
"""Rows of what is left where that is not enough."""
_LONGEST = 120
_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class ShownPlan(NamedTuple):
    """A deployment of the cache."""

    key: str
    plan: Deployment
    measured: MeasuredStep | None


def page(entry: ShownPlan, written: str, other: ShownPlan | None = None) -> bytes:
    """Return the page of a plan as HTML.

    Args:
        entry: The plan.
        written: When and by which version the entry was written.
        other: A plan that it is compared with.
    """
    found = page_data(entry, written, other)
    parts = {name: (files(__package__) / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    made = b""
    for ops, layers in _SIZES:
        made = _filled(replace(found, ops=_first(found.ops, ops), stages=_with_layers(found.stages, layers)), parts)
        if len(made) <= MOST_BYTES:
            return made
    return _filled(_cut(replace(found, ops=_first(found.ops, 0), stages=_with_layers(found.stages, 0))), parts)


def _filled(found: PlanPage, parts: dict[str, str]) -> bytes:
    data = re.sub("[<>&\u2028\u2029]", lambda each: _ESCAPED[each[0]], msgspec.json.encode(found).decode())
    css, js = parts["css"], parts["js"]
    return (
        Template(parts["html"])
        .substitute(
            title=html.escape(found.title),
            style=css,
            script=js,
            data=data,
            text=html.escape(found.text),
            style_hash=_digest(css),
            script_hash=_digest(js),
        )
        .encode()
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _first(ops: Ops, most: int) -> Ops:
    """The first operators of a table, and the texts that these have."""
    count = len(ops.names)
    if count <= most:
        return ops
    columns = {name: getattr(ops, name)[:most] for name in ops.__struct_fields__ if name not in ("texts", "left_out")}
    used: dict[int, int] = {}
    for name in ("target", "module", "source", "dtype"):
        columns[name] = tuple(used.setdefault(number, len(used)) for number in columns[name])
    return Ops(texts=tuple(ops.texts[number] for number in used), left_out=count - most, **columns)


def _with_layers(stages: Sequence[PageStage], most: int) -> tuple[PageStage, ...]:
    """The stages with at most so many layers together."""
    found = []
    for stage in stages:
        shown = stage.layers[:most]
        most -= len(shown)
        found.append(replace(stage, layers=shown, left_out=len(stage.layers) - len(shown)))
    return tuple(found)


def _cut(found: PlanPage) -> PlanPage:
    """What is left of a page of thousands of stages."""
    compared = found.against
    return replace(
        found,
        shortened=f"The plan is too large for a page: at most {_FEW} of each kind are listed, no timeline is drawn.",
        timelines=(),
        uses=tuple(each for each in found.uses if each.critical)[:1],
        memory=tuple(sorted(found.memory, key=lambda each: -each.used)[:_FEW]),
        stages=found.stages[:_FEW],
        edges=found.edges[:_FEW],
        text=found.text[:100_000],
        against=None if compared is None else replace(compared, rows=compared.rows[:_FEW]),
    )


def page_data(entry: ShownPlan, written: str, other: ShownPlan | None = None) -> PlanPage:
    """Return what a page shows; see `page`."""
    plan, measured = entry.plan, entry.measured
    simulated = predicted(plan)
    timelines: list[Timeline] = []
    slots: tuple[int, ...] = tuple(range(len(plan.slots)))
    if simulated.step is not None:
        timelines.append(predicted_timeline(plan, simulated.step))
        slots = simulated.step.slots
    if measured is not None and (found := measured_timeline(plan, measured, slots)) is not None:
        timelines.append(found)
    compared: ComparedPlan | None = None
    if other is not None:
        compared = against(plan, other.plan, other.key, title(other.plan))
        second = predicted(other.plan).step
        if second is not None:
            timelines.append(predicted_timeline(other.plan, second, f"predicted, {other.key[:12]}"))
    text = show(plan) + (f"\n\n{show_measured(plan, measured)}" if measured is not None else "")
    return PlanPage(
        title=title(plan),
        key=entry.key,
        written=written,
        verdict=verdict(plan, measured),
        uses=tuple(slot_uses(plan, simulated.step)) if simulated.step is not None else (),
        costs=costs(plan),
        memory_limit=plan.memory_bytes,
        memory_names=MEMORY_NAMES,
        memory=memory(plan),
        timelines=tuple(timelines),
        timeline_note=simulated.why,
        stages=_stages(plan),
        edges=edges(plan),
        ops=_ops(plan),
        against=compared,
        text=text,
    )


def _stages(plan: Deployment) -> tuple[PageStage, ...]:
    found, first = [], 0
    for stage in plan.stages:
        each, end = stage.estimate, first + len(stage.ops)
        again = sum(stage.segments)
        of = len(stage.segments)
        found.append(
            PageStage(
                plain(stage.name, 40),
                plain(stage.modules, _LONGEST),
                devices_text([plan.slots[slot] for slot in stage.slots]),
                len(stage.slots),
                each.pieces,
                each.forward_us,
                each.backward_us,
                each.allreduce_us,
                ("all" if again == of else f"{again} of {of} segments") if again else "nothing",
                len(stage.ops),
                folded(plan.table, first, end) if plan.table is not None else (),
            )
        )
        first = end
    return tuple(found)


def _ops(plan: Deployment) -> Ops:
    names = tuple(plain(name, _LONGEST) for stage in plan.stages for name in stage.ops)
    stage = tuple(number for number, stage in enumerate(plan.stages) for _ in stage.ops)
    table = plan.table
    if table is None:
        return Ops((), names, stage)
    return Ops(
        texts=tuple(plain(text, _LONGEST) for text in table.texts),
        names=names,
        stage=stage,
        block=table.blocks,
        target=table.targets,
        module=table.modules,
        source=table.sources,
        dtype=table.dtypes,
        flops=table.flops,
        param_bytes=table.param_bytes,
        output_bytes=table.output_bytes,
    )
