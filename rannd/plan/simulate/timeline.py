"""Timelines of a step, predicted or measured: what ran on each slot, and when.

:func:`chrome_traces` writes the JSON of Chrome's trace viewer, which Perfetto (https://ui.perfetto.dev) opens: one
process per timeline and node; threads per slot for computing, receiving and reducing.

Source of the format: "Trace Event Format" (Chromium), complete events (``"ph": "X"``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

COMPUTE, RECEIVE, REDUCE, SEND, WAIT = "compute", "receive", "reduce", "send", "wait"
"""Categories of events: forwards and backwards; messages in transit (measured: waits for them); reductions of
gradients, and the gathering of parameters after them (ZeRO, "G"); of measured steps also what sends messages, and waits
for other ranks."""
CATEGORIES = (COMPUTE, RECEIVE, REDUCE, SEND, WAIT)

_NOTHING_US = 1e-4
"""Overlap that is none: times in nanoseconds were divided."""


class Event(msgspec.Struct, frozen=True, order=True, gc=False):
    """An interval on a slot."""

    slot: int
    category: str
    start_us: float
    us: float
    name: str
    """The text of the action, as in a Program's text, or G. A transfer is an event of its receiver."""


def chrome_trace(events: Iterable[Event], nodes: Sequence[int], *, title: str = "") -> bytes:
    """Format events as `chrome_traces` does. `title`: prefix of the process names, such as 'predicted'."""
    return chrome_traces({title: events}, nodes)


def chrome_traces(timelines: Mapping[str, Iterable[Event]], nodes: Sequence[int]) -> bytes:
    """Format timelines of one time axis as JSON for Chrome's trace viewer and Perfetto.

    Events of one slot and category that overlap (messages of several senders) get separate threads.

    Args:
        timelines: The events by the title of their timeline, the prefix of its process names.
        nodes: Node of each slot.
    """
    found: list[dict[str, object]] = []
    threads: dict[tuple[int, int, str, int], int] = {}
    for number, (title, events) in enumerate(timelines.items()):
        first = number * (max(nodes) + 1)
        for node in sorted(set(nodes)):
            name = f"{title} node {node}".strip()
            found.append({"ph": "M", "name": "process_name", "pid": first + node, "tid": 0, "args": {"name": name}})
        ends: dict[tuple[int, str], list[float]] = {}
        for event in sorted(events):
            lanes = ends.setdefault((event.slot, event.category), [])
            lane = next((at for at, end in enumerate(lanes) if end <= event.start_us + _NOTHING_US), len(lanes))
            lanes[lane : lane + 1] = [event.start_us + event.us]
            key = (number, event.slot, event.category, lane)
            process = first + nodes[event.slot]
            if key not in threads:
                threads[key] = len(threads)
                label = f"slot {event.slot} {event.category}" + (f" {lane + 1}" if lane else "")
                order = (event.slot * len(CATEGORIES) + CATEGORIES.index(event.category)) * 1000 + lane
                for name, value in (("thread_name", {"name": label}), ("thread_sort_index", {"sort_index": order})):
                    found.append({"ph": "M", "name": name, "pid": process, "tid": threads[key], "args": value})
            found.append(
                {
                    "ph": "X",
                    "name": event.name,
                    "cat": event.category,
                    "pid": process,
                    "tid": threads[key],
                    "ts": event.start_us,
                    "dur": event.us,
                }
            )
    return msgspec.json.encode({"traceEvents": found, "displayTimeUnit": "ms"})
