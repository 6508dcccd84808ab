"""Formats the daemon's state as Prometheus metrics (text format version 0.0.4).

A metric consists of HELP and TYPE lines and its samples. Counters end in ``_total`` and restart from 0 when the daemon
starts (requests) or with `rannc-cache stats --zero` (all others); Prometheus handles both as a counter reset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

from rannd.daemon.common.protocol import State

Labels: TypeAlias = Mapping[str, str]
Samples: TypeAlias = Iterable[tuple[Labels, float]]


def exposition(state: State | None) -> str:
    """Return all metrics of a daemon; for None only ``rannd_up 0``."""
    metrics = [_metric("up", "gauge", "Whether the daemon runs.", [({}, int(state is not None))])]
    if state is not None:
        metrics += _metrics(state)
    return "".join(metrics)


def _metrics(state: State) -> list[str]:
    counted = state.statistics
    build = {"version": state.version, "protocol": str(state.protocol)}
    kinds = sorted(state.kinds.items())
    return [
        _metric("build_info", "gauge", "Version of rannd and of its protocol.", [(build, 1)]),
        _gauge("uptime_seconds", "How long the daemon has run.", state.uptime_s),
        _gauge("clients", "Processes that sent a request within the last minute.", state.clients),
        _gauge("entries", "Entries in the cache.", state.entries),
        _gauge("bytes", "Bytes of all values, as they are stored.", state.bytes),
        _gauge("max_bytes", "Bytes of values above which least recently used entries are evicted.", state.max_bytes),
        _gauge("leases", "Values that a process is computing now.", len(state.leases)),
        _gauge("lease_waiters", "Requests that wait for these values.", sum(each.waiting for each in state.leases)),
        _counter("requests_total", "Messages since the daemon started.", state.requests),
        _counter("rejected_total", "Messages among these that violated the protocol.", state.rejected),
        _metric(
            "hits_total",
            "counter",
            "Look-ups that found their value.",
            [({"kind": name}, count.hits) for name, count in kinds],
        ),
        _metric(
            "misses_total",
            "counter",
            "Look-ups that found nothing.",
            [({"kind": name}, count.misses) for name, count in kinds],
        ),
        _counter("stored_total", "Values stored.", counted.stored),
        _counter("evicted_total", "Entries removed because the cache was full.", counted.evicted),
        _counter("removed_total", "Entries removed by a command.", counted.removed),
        _counter("discarded_total", "Entries set aside because a job found them wrong.", counted.discarded),
        _counter("corrupt_total", "Entries set aside because their checksum did not match.", counted.corrupt),
        _counter("waited_total", "Requests that waited for another process to compute the value.", counted.waited),
    ]


def _gauge(name: str, text: str, value: float) -> str:
    return _metric(name, "gauge", text, [({}, value)])


def _counter(name: str, text: str, value: float) -> str:
    return _metric(name, "counter", text, [({}, value)])


def _metric(name: str, kind: Literal["gauge", "counter"], text: str, samples: Samples) -> str:
    name = f"rannd_{name}"
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels(labels)} {value!r}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
