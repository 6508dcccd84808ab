"""Timelines of a step, predicted or measured: what ran on each slot, and when.

:func:`chrome_trace` writes the JSON of Chrome's trace viewer, which Perfetto (https://ui.perfetto.dev) opens: one
process per node; threads per slot for computing, receiving and reducing.

Source of the format: "Trace Event Format" (Chromium), complete events (``"ph": "X"``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

COMPUTE, RECEIVE, REDUCE = "compute", "receive", "reduce"
"""Categories of events: forwards and backwards; messages in transit; reductions of gradients, and the gathering of
parameters after them (ZeRO, "G")."""
CATEGORIES = (COMPUTE, RECEIVE, REDUCE)


class Event(msgspec.Struct, frozen=True, order=True, gc=False):
    """An interval on a slot."""

    slot: int
    category: str
    start_us: float
    us: float
    name: str
    """The text of the action, as in a Program's text, or G. A transfer is an event of its receiver."""


def chrome_trace(events: Iterable[Event], nodes: Sequence[int], *, title: str = "") -> bytes:
    """Format events as JSON for Chrome's trace viewer and Perfetto.

    Events of one slot and category that overlap (messages of several senders) get separate threads.

    Args:
        events: The events.
        nodes: Node of each slot.
        title: Prefix of the process names, such as 'predicted'.
    """
    found: list[dict[str, object]] = []
    for node in sorted(set(nodes)):
        name = f"{title} node {node}".strip()
        found.append({"ph": "M", "name": "process_name", "pid": node, "tid": 0, "args": {"name": name}})
    threads: dict[tuple[int, str, int], int] = {}
    ends: dict[tuple[int, str], list[float]] = {}
    for event in sorted(events):
        lanes = ends.setdefault((event.slot, event.category), [])
        lane = next((at for at, end in enumerate(lanes) if end <= event.start_us), len(lanes))
        lanes[lane : lane + 1] = [event.start_us + event.us]
        key = (event.slot, event.category, lane)
        node = nodes[event.slot]
        if key not in threads:
            threads[key] = len(threads)
            label = f"slot {event.slot} {event.category}" + (f" {lane + 1}" if lane else "")
            order = (event.slot * len(CATEGORIES) + CATEGORIES.index(event.category)) * 1000 + lane
            for name, value in (("thread_name", {"name": label}), ("thread_sort_index", {"sort_index": order})):
                found.append({"ph": "M", "name": name, "pid": node, "tid": threads[key], "args": value})
        found.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.category,
                "pid": node,
                "tid": threads[key],
                "ts": event.start_us,
                "dur": event.us,
            }
        )
    return msgspec.json.encode({"traceEvents": found, "displayTimeUnit": "ms"})
