"""Draws a plan for the terminal: bars of memory, and what devices do in a step.

::

    memory     limit 10.59 GiB per device
    0:0-7  0   ########........................  24.94 GiB  35 %
    0:8-15 1   ######..........................  19.72 GiB  28 %

    schedule   one column is 0.31 ms
    0:0 stage 0  F0F1F2..B0----B1----B2----RR
    0:1 stage 1  ..F0B0----F1B1----F2B2----RR
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rannd.plan.deployment import Deployment
from rannd.plan.plan_text import bytes_text, time_text
from rannd.plan.simulate.plan_records import DrawnStep
from rannd.plan.simulate.timeline import COMPUTE, REDUCE, Event
from rannd.runner.page.page_timeline import predicted
from rannd.runner.page.plan_verdict import memory

WIDTH = 100
"""Columns of a drawing where there is no terminal."""
MOST_LINES = 16
"""Devices that are drawn."""
_BAR = 32


def drawn(deployment: Deployment, width: int = WIDTH) -> str:
    """Draw memory and schedule of a plan in lines of at most `width` characters, or a few more for long names."""
    found = predicted(deployment)
    schedule = (
        f"schedule  not drawn: {found.why}" if found.step is None else schedule_text(deployment, found.step, width)
    )
    return f"{memory_text(deployment)}\n\n{schedule}"


def memory_text(deployment: Deployment) -> str:
    """Draw the planned memory of the devices against what they may use."""
    rows = memory(deployment)
    limit = deployment.memory_bytes
    most = max([limit, *(row.used for row in rows), 1])
    names = [f"{row.devices} stage {row.stages}" for row in rows[:MOST_LINES]]
    wide = max(map(len, names))
    head = f"a full bar is {bytes_text(most)}" + (", what a device may use" if most == limit else "")
    lines = [f"memory    {head}"]
    for name, row in zip(names, rows, strict=False):
        marks = min(max(round(_BAR * row.used / most), row.used > 0), _BAR)
        part = f"  {100 * row.used / limit:3.0f} %" if limit else ""
        over = "  too much" if limit and row.used > limit else ""
        lines.append(f"{name:{wide}}  {'#' * marks:.<{_BAR}}  {bytes_text(row.used):>10}{part}{over}")
    if len(rows) > MOST_LINES:
        lines.append(f"and {len(rows) - MOST_LINES} more")
    return "\n".join(lines)


def schedule_text(deployment: Deployment, step: DrawnStep, width: int = WIDTH) -> str:
    """Draw what devices compute and reduce in a step: a name where an action begins, dashes while it goes on."""
    places = {slot: place for place, slot in enumerate(step.slots) if slot < len(deployment.slots)}
    shown = sorted(places)[:MOST_LINES]
    names = []
    for slot in shown:
        numbers = [str(number) for number, stage in enumerate(deployment.stages) if slot in stage.slots]
        where = deployment.slots[slot]
        names.append(f"{where.node}:{where.device} stage {','.join(numbers)}")
    wide = max(map(len, names))
    columns = max(width - wide - 2, 20)
    unit = max(step.simulation.step_us, 1e-3) / columns
    after = ", G copies and gathering after it" if any(each.name == "G" for each in step.simulation.events) else ""
    head = f"one column is {time_text(unit)}; F forward, B backward, W weight gradients, R reduction{after}, . nothing"
    lines = [textwrap.fill(head, width, initial_indent="schedule  ", subsequent_indent=" " * 10)]
    for name, slot in zip(names, shown, strict=True):
        own = [event for event in step.simulation.events if event.slot == places[slot]]
        lines.append(f"{name:{wide}}  {_line(own, unit, columns)}")
    if len(deployment.slots) > len(shown):
        lines.append(f"and {len(deployment.slots) - len(shown)} more devices")
    return "\n".join(lines)


def _line(events: Sequence[Event], unit: float, columns: int) -> str:
    """One device: what is computed is drawn over what is reduced beside it."""
    cells = ["."] * columns
    order = {REDUCE: 0, COMPUTE: 1}
    drawn_events = [event for event in events if event.category in order]
    for event in sorted(drawn_events, key=lambda each: (order[each.category], each.start_us)):
        first = min(round(event.start_us / unit), columns - 1)
        end = min(max(round((event.start_us + event.us) / unit), first + 1), columns)
        # A name that has no room has its letter; a number that was cut off would be another one. Reductions follow each
        # other, or are below computations: their stages would be digits without a begin.
        whole = event.category == COMPUTE and len(event.name) <= end - first
        name = event.name if whole else event.name[:1]
        fill = "-" if event.category == COMPUTE else name
        cells[first:end] = f"{name:{fill}<{end - first}}"
    return "".join(cells)
