"""Formats a deployment as text: stages, memory, predicted times, and plans that were not chosen."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby, zip_longest

from msgspec.structs import replace

from rannd.errors import UsageError
from rannd.plan.compatibility import plain
from rannd.plan.deployment import Deployment, Slot, Stage
from rannd.plan.measured_step import TOLD, MeasuredStep
from rannd.plan.slot_memory import device_bytes, fullest_bytes, stages_by_slots
from rannd.units import count_text

_MIB = 2**20
_SHORT_S = 0.1
"""Step time below which the plan line has milliseconds."""
_MOST_STAGES = 8
"""Maximum number of stages that the plan line names."""
_MOST_REASONS = 16
_MOST_WHY = 240
"""Maximum number of characters of a reason."""
_INDENT = 10
_ROOM = 30
"""Columns from which on a long last cell is wrapped beside the others."""


def show(deployment: Deployment, batch_size: int | None = None, width: int | None = None) -> str:
    """Describe a deployment for a global batch of `batch_size` rows (None: the batch that it was planned for).

    For another batch, compute times and the bytes of activations and transfers are scaled with the rows of a
    microbatch, all else stays: a rough estimate, marked as one. `width`: maximum length of a line.

    Raises:
        UsageError: `batch_size` is not an int of 1 or more.
    """
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise UsageError(f"a batch of {batch_size!r} rows; give the rows of all ranks' mini-batches together")
    planned = deployment.batch_rows
    shown = deployment if batch_size in (None, planned) else scaled(deployment, batch_size or planned)
    tables = [_stages(shown), _memory(shown)]
    if _together(shown):
        tables.append(_devices(shown))
    if deployment.reasons:
        tables.append(_why(deployment))
    if deployment.alternatives:
        tables.append(_alternatives(deployment))
    head = [_line(name, text, width) for name, text in _head(shown, planned)]
    return "\n\n".join(["\n".join(head), *(aligned(heads, rows, width) for heads, rows in tables)])


def show_measured(deployment: Deployment, measured: MeasuredStep, width: int | None = None) -> str:
    """Describe what steps of a deployment took beside what was predicted, such as::

        measured   20 steps, on the slowest replica of each stage; error: measured / predicted - 1
        stage      what          predicted  measured   error
        0          forward       4.506 ms   4.285 ms   -4.9 %
                   not computing 2.920 ms   3.160 ms   +8.2 %

    What follows are parts of it that no prediction tells apart, and the time between steps.
    """
    step_us = measured.step_us
    rows = [("all", "step", *_compared(deployment.step_us, step_us))]
    for slots, numbers in stages_by_slots(deployment).items():
        ranks = [measured.ranks[slot] for slot in slots]
        planned_us = 0.0
        for number in numbers:
            each, times = deployment.stages[number].estimate, list(measured.of_stage(number))
            planned_us += each.forward_us + each.backward_us
            forward = max(one.pieces * one.forward.median_us for one in times)
            backward = max(one.pieces * (one.backward.median_us + one.weight.median_us) for one in times)
            weight = max(one.pieces * one.weight.median_us for one in times)
            rows.append((str(number), "forward", *_compared(each.forward_us, forward)))
            rows.append(("", "backward", *_compared(each.backward_us, backward)))
            if weight:
                rows.append(("", "of it weight grad", *_compared(each.weight_us, weight)))
        others_us = max(rank.processor_us for rank in ranks)
        if others_us > TOLD * step_us:
            rows.append(("", "of it, others' processes", "", time_text(others_us), ""))
        reduce_us = max(rank.reduce_us for rank in ranks)
        predicted_us = sum(deployment.stages[number].estimate.allreduce_us for number in numbers)
        if reduce_us or predicted_us:
            rows.append(("", "all-reduce", *_compared(predicted_us, reduce_us)))
        idle = [max(step_us - rank.computing_us, 0.0) for rank in ranks]
        rows.append(("", "not computing", *_compared(max(deployment.step_us - planned_us, 0.0), min(idle))))
        for what, found in (
            ("waiting for values", [sum(wait.wait_us for wait in rank.waits) for rank in ranks]),
            ("sending", [rank.send_us + rank.settle_us + rank.pack_us for rank in ranks]),
            ("waiting for reductions", [rank.drain_us for rank in ranks]),
            ("waiting for the ranks", [rank.agree_us for rank in ranks]),
            ("the runtime", [rank.rest_us for rank in ranks]),
            ("between steps", [rank.between_us for rank in ranks]),
        ):
            rows.append(("", what, "", time_text(max(found)), ""))
    steps = count_text(measured.steps, "step")
    beside = " beside other processes, which made them longer" if measured.disturbed else ""
    head = f"{steps}{beside}; the slowest replica of each stage; error: measured / predicted - 1"
    table = aligned(("stage", "what", "predicted", "measured", "error"), rows, width)
    return f"{_line('measured', head, width)}\n{table}"


def _compared(predicted_us: float, measured_us: float) -> tuple[str, str, str]:
    error = f"{100 * (measured_us / predicted_us - 1):+.1f} %" if predicted_us and measured_us else ""
    return time_text(predicted_us), time_text(measured_us), error


def plan_line(deployment: Deployment, rank_of_slot: Sequence[int] | None = None) -> str:
    """Describe a deployment in one line, such as::

        2 stages: embed..layers.3 on rank 0, layers.4..head on rank 1; 8 microbatches; step about 0.88 s; 175 of 10,847
        MiB per device

    Args:
        deployment: The deployment.
        rank_of_slot: The rank that is bound to each slot; None: devices are named instead (node:device).
    """
    stages = [
        f"{stage_label(deployment, stage)} on {_who(deployment, stage, rank_of_slot)}" for stage in deployment.stages
    ]
    if len(stages) > _MOST_STAGES:
        stages[_MOST_STAGES - 2 : -1] = [f"{len(stages) - _MOST_STAGES + 1} more"]
    seconds = deployment.step_us / 1e6
    most = fullest_bytes(deployment)
    limit = deployment.memory_bytes // _MIB
    allowed = f" of {limit:,}" if limit else ""
    shown = min(math.ceil(most / _MIB), limit) if limit and most <= deployment.memory_bytes else math.ceil(most / _MIB)
    return "; ".join(
        (
            f"{count_text(len(deployment.stages), 'stage')}{_together(deployment)}"
            f"{f', ZeRO {zero}' if (zero := deployment.zero) else ''}: "
            f"{', '.join(stages)}{_offloaded(deployment)}",
            count_text(deployment.microbatches, "microbatch"),
            f"step about {f'{seconds:.2f} s' if seconds >= _SHORT_S else f'{seconds * 1e3:.1f} ms'}",
            f"{shown:,}{allowed} MiB per device",
        )
    )


def _together(deployment: Deployment) -> str:
    """How many stages each device has, if these are several: ``, 2 on each device``."""
    each = sum(len(stage.slots) for stage in deployment.stages) // len(deployment.slots)
    return f", {each} on each device" if each > 1 else ""


def _offloaded(deployment: Deployment) -> str:
    most = max(
        sum(deployment.stages[number].estimate.offloaded_bytes for number in numbers)
        for numbers in stages_by_slots(deployment).values()
    )
    what = ["training state" if deployment.offload_params else "optimizer state"] * any(deployment.offloads[:2])
    what += ["activations"] * deployment.offload_activations
    return f", {math.ceil(most / _MIB):,} MiB of {' and '.join(what)} offloaded" if most else ""


def _whole(deployment: Deployment) -> str:
    staying = [str(number) for number, stage in enumerate(deployment.stages) if stage.stays_whole]
    where = "" if len(staying) == len(deployment.stages) else f" of stages {', '.join(staying)}"
    return f" (parameters{where} whole until the last microbatch)" if staying else ""


def title(deployment: Deployment) -> str:
    """Name the model and the number of stages: ``GPT2LMHeadModel 11.1M, 2 stages``."""
    return f"{plain(deployment.model) or 'a model'}, {count_text(len(deployment.stages), 'stage')}"


def piece_rows(deployment: Deployment) -> int:
    """Rows of the largest microbatch."""
    return math.ceil(math.ceil(deployment.batch_rows / len(deployment.slots)) / deployment.microbatches)


def scaled(deployment: Deployment, batch_size: int) -> Deployment:
    """Return the deployment with estimates for another batch, in proportion to the rows of a microbatch."""
    other = replace(deployment, batch_rows=batch_size)
    factor = piece_rows(other) / piece_rows(deployment)
    stages = []
    for stage in deployment.stages:
        each = stage.estimate
        rows = {name: getattr(each, name) * factor for name in ("forward_us", "backward_us", "weight_us")} | {
            name: math.ceil(getattr(each, name) * factor)
            for name in ("input_bytes", "output_bytes", "activation_bytes", "comm_bytes", "weight_bytes")
        }
        rows["working_bytes"] = math.ceil((each.working_bytes - each.whole_bytes) * factor) + each.whole_bytes
        grown = replace(each, **rows)
        more = sum(
            getattr(grown, name) - getattr(each, name) for name in ("activation_bytes", "comm_bytes", "working_bytes")
        )
        stages.append(replace(stage, estimate=replace(grown, total_bytes=each.total_bytes + more, most_bytes=0)))
    reduce = min(max(stage.estimate.allreduce_us for stage in stages), deployment.step_us)
    step = (deployment.step_us - reduce) * factor + reduce
    # A bound for the planned batch does not hold for this one.
    return replace(other, stages=tuple(stages), step_us=step, e_us=0.0, bound_us=0.0)


def bubble(deployment: Deployment) -> float:
    """Fraction of all devices' time that is not spent in forwards and backwards; 0 if the step takes no time."""
    busy = sum(
        len(stage.slots) * (stage.estimate.forward_us + stage.estimate.backward_us) for stage in deployment.stages
    )
    whole = len(deployment.slots) * deployment.step_us
    return max(1 - busy / whole, 0.0) if whole > 0 else 0.0


# -- parts ----------------------------------------------------------------------------------------------------


_Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Heads and rows."""


def _head(deployment: Deployment, planned: int) -> list[tuple[str, str]]:
    made, world = deployment.made, len(deployment.slots)
    rows, nodes = deployment.batch_rows, len({slot.node for slot in deployment.slots})
    lines = [("plan", plan_line(deployment))]
    if deployment.model:
        lines.append(("model", plain(deployment.model)))
    lines.append(("graph", plain(deployment.graph_hash)))
    if made is not None:
        lines += [
            ("device", plain(made.device)),
            ("times", f"{plain(made.costs)}, by rannd {plain(made.rannd)} and torch {plain(made.torch)}"),
        ]
    stages = len(deployment.stages)
    schedule = plain(deployment.schedule) + (f", ZeRO {deployment.zero}{_whole(deployment)}" if deployment.zero else "")
    lines += [
        ("devices", f"{world} on {count_text(nodes, 'node')}, {count_text(stages, 'stage')}{_together(deployment)}"),
        (
            "batch",
            f"{count_text(rows, 'row')}: {count_text(world, 'rank')} x "
            f"{count_text(deployment.microbatches, 'microbatch')} of {piece_rows(deployment)} at most",
        ),
        ("schedule", f"{schedule}; neighbouring devices: {plain(deployment.placement)}"),
        ("step", f"{time_text(deployment.step_us)} predicted, of which {bubble(deployment):.1%} is not computing"),
    ]
    if rows != planned:
        lines.append(
            ("", f"rough estimate: planned for {count_text(planned, 'row')}, scaled by the rows of a microbatch")
        )
    if deployment.bound_us > 0:
        closed = deployment.e_us or deployment.step_us
        gap = max(closed / deployment.bound_us - 1, 0.0)
        lines.append(
            (
                "E",
                f"{time_text(closed)} by the closed form, lower bound of all plans {time_text(deployment.bound_us)}: "
                f"gap {gap:.1%}",
            )
        )
    if not deployment.searched_all:
        lines.append(("search", "cut off: a better plan may exist"))
    most = fullest_bytes(deployment)
    allowed = f" of {bytes_text(deployment.memory_bytes)} allowed" if deployment.memory_bytes else ""
    lines.append(("memory", f"{bytes_text(most)}{allowed} on the fullest device"))
    return lines


def _line(name: str, text: str, width: int | None) -> str:
    wrapped = textwrap.wrap(text, width - _INDENT) if width is not None else [text]
    return f"{name:<{_INDENT}}" + f"\n{'':{_INDENT}}".join(wrapped)


def _stages(deployment: Deployment) -> _Table:
    rows = []
    for number, stage in enumerate(deployment.stages):
        each = stage.estimate
        rows.append(
            (
                str(number),
                plain(stage.modules),
                plain(stage.name, 24),
                devices_text([deployment.slots[slot] for slot in stage.slots]),
                str(each.pieces),
                str(each.in_flight),
                "yes" if stage.recompute else "no",
                time_text(each.forward_us),
                time_text(each.backward_us),
                time_text(each.weight_us) if each.weight_us else "",
                time_text(each.allreduce_us),
                bytes_text(each.input_bytes),
                bytes_text(each.output_bytes),
                _ops(stage),
            )
        )
    heads = ("stage", "modules", "blocks", "devices", "microbatches", "in flight", "recompute", "forward", "backward",
             "weight grad", "all-reduce", "in/microbatch", "out/microbatch", "operators")  # fmt: skip
    return heads, rows


def _memory(deployment: Deployment) -> _Table:
    kinds = (
        "param_bytes",
        "grad_bytes",
        "optimizer_bytes",
        "activation_bytes",
        "comm_bytes",
        "working_bytes",
        "total_bytes" if _together(deployment) else "used_bytes",
    )
    rows = [
        (
            str(number),
            *(bytes_text(getattr(stage.estimate, kind)) for kind in kinds),
            bytes_text(stage.estimate.offloaded_bytes) if any(deployment.offloads) else "",
        )
        for number, stage in enumerate(deployment.stages)
    ]
    heads = (
        "stage",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "transfers",
        "temporary",
        "together" if _together(deployment) else "total per device",
        "offloaded",
    )
    return heads, rows


def _devices(deployment: Deployment) -> _Table:
    """Which stages the devices have, if they have several, and what these need together."""
    sizes = device_bytes(deployment)
    rows = [
        (
            devices_text([deployment.slots[slot] for slot in slots]),
            ", ".join(map(str, numbers)),
            bytes_text(sizes[slots]),
        )
        for slots, numbers in stages_by_slots(deployment).items()
    ]
    return ("devices", "stages", "together per device"), rows


def _why(deployment: Deployment) -> _Table:
    reasons = deployment.reasons[:_MOST_REASONS]
    rows = [(plain(each.what), plain(each.chosen), plain(each.why, _MOST_WHY)) for each in reasons]
    return ("chosen", "", "why"), rows


def _alternatives(deployment: Deployment) -> _Table:
    rows = []
    for other in deployment.alternatives:
        least = "at least " if other.at_least else ""
        slower = f"{least}{other.step_us / deployment.step_us:.3f}x" if other.step_us and deployment.step_us else ""
        what = f"does not fit: {bytes_text(other.over_bytes)} too much" if other.over_bytes else ""
        step = f"{least}{time_text(other.step_us)}" if other.step_us else ""
        rows.append((plain(other.name), step, slower, bytes_text(other.most_bytes), what))
    batch = count_text(deployment.batch_rows, "row")
    return (f"not chosen ({batch})", "step", "relative", "fullest device", "note"), rows


# -- words ----------------------------------------------------------------------------------------------------


def aligned(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Format a table with aligned columns; empty columns are left out.

    `width`: maximum length of a line. Columns that have no room follow below, each time beside the first one; what is
    too long for that is wrapped.
    """
    used = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    widths = {column: max(len(heads[column]), *(len(row[column]) for row in rows)) for column in used}
    parts = [used[:1]]
    for column in used[1:]:
        room = (width or math.inf) - sum(widths[each] + 2 for each in parts[-1])
        wraps = column == used[-1] and room >= _ROOM
        if widths[column] > room and not wraps and len(parts[-1]) > 1:
            parts.append(used[:1])
            room = (width or math.inf) - widths[used[0]] - 2
        parts[-1].append(column)
        widths[column] = int(min(widths[column], max(room, 1)))
    lines = []
    for part in parts:
        for row in (heads, *rows):
            cells = [textwrap.wrap(row[column], widths[column]) if width else [row[column]] for column in part]
            for inside in zip_longest(*cells, fillvalue=""):
                filled = (text.ljust(widths[column]) for text, column in zip(inside, part, strict=True))
                lines.append("  ".join(filled).rstrip())
        lines.append("")
    return "\n".join(lines[:-1])


def devices_text(slots: Iterable[Slot]) -> str:
    """Format slots: ``0-2:0-3 3:0,2`` for devices 0 to 3 of nodes 0 to 2, and devices 0 and 2 of node 3."""
    devices: dict[int, list[int]] = {}
    for slot in sorted(slots):
        devices.setdefault(slot.node, []).append(slot.device)
    told = []
    for used, alike in groupby(devices, key=lambda node: _runs(devices[node])):
        told.append(f"{_runs(list(alike))}:{used}")
    return " ".join(told)


def _runs(numbers: Sequence[int]) -> str:
    """Format sorted numbers: ``0-3,5`` for 0, 1, 2, 3 and 5."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        held = [number for _, number in run]
        runs.append(f"{held[0]}-{held[-1]}" if len(held) > 1 else str(held[0]))
    return ",".join(runs)


def stage_label(deployment: Deployment, stage: Stage) -> str:
    """Name a stage for users: its modules, or if they are not known its operators."""
    if len(deployment.stages) == 1:
        return "the whole model"
    return plain(stage.modules) or f"{plain(stage.ops[0], 40)}..{plain(stage.ops[-1], 40)}"


def holders(stage: Stage, rank_of_slot: Sequence[int]) -> str:
    """Name the ranks of a stage: ``ranks 0-3,5``."""
    several = "s" if len(stage.slots) > 1 else ""
    return f"rank{several} {_runs(sorted(rank_of_slot[slot] for slot in stage.slots))}"


def _who(deployment: Deployment, stage: Stage, rank_of_slot: Sequence[int] | None) -> str:
    if rank_of_slot is not None:
        return holders(stage, rank_of_slot)
    several = "s" if len(stage.slots) > 1 else ""
    return f"device{several} {devices_text([deployment.slots[slot] for slot in stage.slots])}"


def _ops(stage: Stage) -> str:
    first, last = plain(stage.ops[0], 40), plain(stage.ops[-1], 40)
    return f"{len(stage.ops)}, {first} .. {last}" if len(stage.ops) > 1 else first


def time_text(us: float) -> str:
    """Format a time: ``12.345 ms``."""
    return f"{us / 1e3:.3f} ms" if us < 1e6 else f"{us / 1e6:.3f} s"


def bytes_text(count: float) -> str:
    """Format a size: ``1.50 GiB``."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{int(count)} B"
