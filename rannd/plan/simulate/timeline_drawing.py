"""Draws timelines as text: one line per slot, one column per unit of time."""

from __future__ import annotations

from collections.abc import Iterable

from rannd.plan.simulate.timeline import COMPUTE, REDUCE, Event


def draw(events: Iterable[Event], world: int, unit_us: float) -> str:
    """Draw what the slots compute and reduce, one column per `unit_us` microseconds::

        slot 0  F0  F1  .   .   B0  --  B1  --
        slot 1  .   F0  B0  --  F1  B1  --  .

    ``--`` the same action continues, ``.`` idle. A column shows what runs in its middle; transfers are not drawn,
    reductions only where nothing is computed.
    """
    shown = sorted((event for event in events if event.category in (COMPUTE, REDUCE)), key=lambda each: each.category)
    columns = max((round((event.start_us + event.us) / unit_us) for event in shown), default=0)
    cells = [["."] * columns for _ in range(world)]
    for event in shown:
        text = event.name
        # From the first column whose middle is not before the start to the last one before the end.
        for column in range(round(event.start_us / unit_us), round((event.start_us + event.us) / unit_us)):
            if cells[event.slot][column] == ".":
                cells[event.slot][column], text = text, "--"
    width = max((len(cell) for row in cells for cell in row), default=0) + 1
    label = len(str(world - 1))
    lines = [f"slot {slot:{label}d}  " + " ".join(f"{cell:{width}s}" for cell in row) for slot, row in enumerate(cells)]
    return "\n".join(line.rstrip() for line in lines) + "\n"
