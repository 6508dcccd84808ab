"""The parts of a page that say what was decided, why, and what costs most."""

from __future__ import annotations

from collections.abc import Sequence

from rannd.plan.compatibility import plain
from rannd.plan.deployment import Alternative, Deployment, OpTable
from rannd.plan.measured_step import MeasuredStep
from rannd.plan.plan_text import bubble, bytes_text, devices_text, piece_rows, time_text
from rannd.plan.slot_memory import busiest_us, device_bytes, stages_by_slots
from rannd.runner.page.page_data import Cost, DeviceMemory, PageEdge, PlanVerdict, Runner

MEMORY_NAMES = ("parameters", "gradients", "optimizer", "activations", "transfers", "temporary")
_MEMORY = ("param_bytes", "grad_bytes", "optimizer_bytes", "activation_bytes", "comm_bytes", "working_bytes")
MOST_COSTS = 12
_MOST_TOLD = 16
_LONGEST_WHY = 240
_RANKS = "the ranks"


def verdict(deployment: Deployment, measured: MeasuredStep | None) -> PlanVerdict:
    """Say what was decided."""
    others = deployment.alternatives[:_MOST_TOLD]
    busy_us = busiest_us(deployment)
    fits = [each for each in others if each.step_us and not each.over_bytes]
    best = min(fits, key=lambda each: each.step_us, default=None)
    told = tuple(_runner(each, deployment, busy_us) for each in others)
    return PlanVerdict(
        deployment.step_us,
        measured.step_us if measured is not None else 0.0,
        measured.steps if measured is not None else 0,
        deployment.e_us,
        _certificate(deployment),
        bubble(deployment),
        _runner(best, deployment, busy_us) if best is not None else None,
        told,
        tuple((plain(each.what), plain(each.chosen), plain(each.why, _LONGEST_WHY)) for each in deployment.reasons)[
            :_MOST_TOLD
        ],
        tuple(_facts(deployment)),
    )


def _certificate(deployment: Deployment) -> str:
    cut = "" if deployment.searched_all else "The search was cut off: a better plan may exist. "
    if deployment.bound_us <= 0:
        return cut + (
            "No lower bound was computed: there is one for plans that the search over stages found, with its schedule."
        )
    closed = deployment.e_us or deployment.step_us
    gap = max(closed / deployment.bound_us - 1, 0.0)
    bound = time_text(deployment.bound_us)
    if gap < 0.0005:
        told = f"{cut}With these costs no plan has a smaller E: the lower bound of all of them is {bound}, too."
    else:
        told = f"{cut}With these costs E of every plan is at least {bound}: that of this one is {gap:.1%} above."
    return f"{told} E is a formula, the predicted step is simulated: it may be shorter than E, and than this bound."


def _runner(other: Alternative, deployment: Deployment, busy_us: float) -> Runner:
    return Runner(plain(other.name), other.step_us, other.at_least, other.most_bytes, _why(other, deployment, busy_us))


def _why(other: Alternative, deployment: Deployment, busy_us: float) -> str:
    if other.over_bytes:
        return f"does not fit: {bytes_text(other.over_bytes)} too much on a device"
    if not (other.step_us and deployment.step_us):
        return ""
    ratio = other.step_us / deployment.step_us - 1
    slower = f"{ratio:.1%} slower" if ratio >= 0 else f"{-ratio:.1%} faster, less than is asked for to prefer it"
    if other.at_least:
        slower = f"at least {max(ratio, 0.0):.1%} slower, by a lower bound"
    if not other.busy_us:
        return slower
    # A step is what the device computes that computes longest, and all in which it does not compute.
    computing = other.busy_us - busy_us
    waiting = (other.step_us - deployment.step_us) - computing
    least = "at least " if other.at_least and waiting > 0 else ""
    if other.at_least and waiting <= 0:
        return f"{slower}: the device that computes longest computes {_more(computing)}"
    return (
        f"{slower}: the device that computes longest computes {_more(computing)}, and has {least}{_more(waiting)} of "
        "waiting, transfers and reductions"
    )


def _more(us: float) -> str:
    return f"{time_text(abs(us))} {'more' if us >= 0 else 'less'}"


def _facts(deployment: Deployment) -> list[tuple[str, str]]:
    made, world = deployment.made, len(deployment.slots)
    nodes = len({slot.node for slot in deployment.slots})
    found = [
        ("model", plain(deployment.model) or "not known"),
        ("graph", plain(deployment.graph_hash)),
        ("schedule", plain(deployment.schedule) + (f", ZeRO {deployment.zero}" if deployment.zero else "")),
        ("devices", f"{world} on {nodes} {'node' if nodes == 1 else 'nodes'}"),
        (
            "batch",
            f"{deployment.batch_rows} rows: {world} ranks, {deployment.microbatches} microbatches each, of "
            f"{piece_rows(deployment)} rows at most",
        ),
    ]
    if made is not None:
        found += [
            ("device", plain(made.device)),
            ("times", f"{plain(made.costs)}, by rannd {plain(made.rannd)} and torch {plain(made.torch)}"),
        ]
    return found


def memory(deployment: Deployment) -> tuple[DeviceMemory, ...]:
    """Return the planned memory of devices, those with the same stages together."""
    sizes = device_bytes(deployment)
    found = []
    for slots, numbers in stages_by_slots(deployment).items():
        estimates = [deployment.stages[number].estimate for number in numbers]
        parts = [sum(getattr(each, name) for each in estimates) for name in _MEMORY[:-1]]
        parts.append(max(each.working_bytes for each in estimates))
        places = devices_text([deployment.slots[slot] for slot in slots])
        stages = ", ".join(map(str, numbers))
        found.append(DeviceMemory(places, stages, len(slots), sizes[slots], tuple(parts)))
    return tuple(found)


def edges(deployment: Deployment) -> tuple[PageEdge, ...]:
    """Return what stages send to each other, if that is known."""
    if deployment.planned is None:
        return ()
    nodes = len({slot.node for slot in deployment.slots})
    last = len(deployment.stages)
    return tuple(
        PageEdge(
            f"stage {each.src}" if each.src >= 0 else _RANKS,
            f"stage {each.dst}" if each.dst < last else _RANKS,
            each.values_bytes,
            each.near_us,
            each.grads_bytes,
            each.near_grads_us,
            each.far_us if nodes > 1 else 0.0,
        )
        for each in deployment.planned.edges
    )


def costs(deployment: Deployment) -> tuple[Cost, ...]:
    """Return what takes longest in a step, of one device: blocks, reductions and transfers."""
    found = []
    for number, stage in enumerate(deployment.stages):
        each = stage.estimate
        if each.allreduce_us:
            found.append(Cost(f"reduction of gradients, stage {number}", stage.modules, each.allreduce_us))
    if deployment.table is not None and deployment.table.block_times:
        found += _blocks(deployment, deployment.table)
    else:
        for number, stage in enumerate(deployment.stages):
            found.append(Cost(f"forward, stage {number}", stage.modules, stage.estimate.forward_us))
            found.append(Cost(f"backward, stage {number}", stage.modules, stage.estimate.backward_us))
    planned = deployment.planned
    for edge in planned.edges if planned is not None else ():
        stages = deployment.stages
        pieces = min(stages[number].estimate.pieces for number in (edge.src, edge.dst) if 0 <= number < len(stages))
        took = pieces * (edge.near_us + edge.near_grads_us)
        ends = " to ".join("ranks" if not 0 <= each < len(stages) else f"stage {each}" for each in (edge.src, edge.dst))
        detail = f"{pieces} times {bytes_text(edge.values_bytes)} there, {bytes_text(edge.grads_bytes)} back"
        found.append(Cost(f"transfers, {ends}", detail, took))
    found = sorted((each for each in found if each.us > 0), key=lambda each: -each.us)[:MOST_COSTS]
    return tuple(Cost(each.what, plain(each.detail, 120), each.us) for each in found)


def _blocks(deployment: Deployment, table: OpTable) -> list[Cost]:
    """Forward and backward of the blocks, of all microbatches of a replica; those that take the same together."""
    found: dict[tuple[str, float], tuple[list[int], str]] = {}
    first = 0
    for number, stage in enumerate(deployment.stages):
        places: dict[int, list[int]] = {}
        for place in range(first, first + len(stage.ops)):
            places.setdefault(table.blocks[place], []).append(place)
        first += len(stage.ops)
        for block, own in places.items():
            if block >= len(table.block_times):
                continue
            us, modules = table.block_times[block], _modules(table, own)
            for what, each in (("forward", us.forward_us), ("backward", us.backward_us)):
                name = f"{what}, stage {number}", each * stage.estimate.pieces
                found.setdefault(name, ([], modules))[0].append(block)
    return [
        Cost(f"{what}, block {own[0]}", modules, us)
        if len(own) == 1
        else Cost(f"{what}, {len(own)} equal blocks", f"{time_text(us)} each; {modules} and so on", len(own) * us)
        for (what, us), (own, modules) in found.items()
    ]


def _modules(table: OpTable, places: Sequence[int]) -> str:
    named = [table.texts[table.modules[place]] for place in places]
    named = [each for each in named if each]
    if not named:
        return ""
    return named[0] if named[0] == named[-1] else f"{named[0]} .. {named[-1]}"
