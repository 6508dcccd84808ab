"""What two plans do differently, as rows of a table."""

from __future__ import annotations

from collections.abc import Callable

from rannd.plan.compatibility import plain
from rannd.plan.deployment import Deployment
from rannd.plan.plan_text import bubble, bytes_text, devices_text, time_text
from rannd.plan.slot_memory import fullest_bytes
from rannd.runner.page.page_data import ComparedPlan, PlanDifference

_OF_STAGE = ("modules", "operators", "devices", "recompute", "forward + backward", "memory")


def against(this: Deployment, other: Deployment, key: str, title: str) -> ComparedPlan:
    """Compare a plan with another one, of which `key` and `title` are."""
    note = "" if this.graph_hash == other.graph_hash else "They are plans of different graphs."
    if not note and this.batch_rows != other.batch_rows:
        note = "They are plans for different batches."
    return ComparedPlan(key, title, tuple(differences_of(this, other)), note)


def differences_of(this: Deployment, other: Deployment) -> list[PlanDifference]:
    """Return a row for each quantity of the whole, and of each stage; those that are equal, too."""
    rows = [
        _amount("step", this.step_us, other.step_us, time_text),
        _amount("E, closed form", this.e_us, other.e_us, time_text),
        _amount("not computing", bubble(this), bubble(other), lambda part: f"{part:.1%}"),
        _amount("fullest device", fullest_bytes(this), fullest_bytes(other), bytes_text),
        _amount("memory allowed", this.memory_bytes, other.memory_bytes, bytes_text),
        _amount("rows of the batch", this.batch_rows, other.batch_rows, str),
        _amount("devices", len(this.slots), len(other.slots), str),
        _amount("stages", len(this.stages), len(other.stages), str),
        _amount("microbatches", this.microbatches, other.microbatches, str),
        PlanDifference("schedule", plain(this.schedule), plain(other.schedule)),
        PlanDifference("ZeRO", str(this.zero or "no"), str(other.zero or "no")),
        PlanDifference("neighbouring devices", plain(this.placement), plain(other.placement)),
        PlanDifference("offloaded", _offloaded(this), _offloaded(other)),
    ]
    for number in range(max(len(this.stages), len(other.stages))):
        one, two = (_stage(each, number) for each in (this, other))
        rows += [
            PlanDifference(f"stage {number}: {what}", a, b) for what, a, b in zip(_OF_STAGE, one, two, strict=True)
        ]
    moved = _moved(this, other)
    if moved is not None:
        rows.append(PlanDifference("operators in another stage", str(moved), "", ""))
    return rows


def differing(rows: list[PlanDifference]) -> list[PlanDifference]:
    """Return the rows that differ."""
    return [row for row in rows if row.this != row.other]


def _amount(what: str, this: float, other: float, text: Callable[[float], str]) -> PlanDifference:
    change = f"{100 * (this / other - 1):+.1f} %" if this and other and this != other else ""
    return PlanDifference(what, text(this), text(other), change)


def _offloaded(plan: Deployment) -> str:
    names = ("optimizer state", "parameters", "activations")
    return ", ".join(name for name, is_so in zip(names, plan.offloads, strict=True) if is_so) or "nothing"


def _stage(plan: Deployment, number: int) -> tuple[str, ...]:
    if number >= len(plan.stages):
        return ("",) * 6
    stage = plan.stages[number]
    each = stage.estimate
    return (
        plain(stage.modules),
        str(len(stage.ops)),
        devices_text([plan.slots[slot] for slot in stage.slots]),
        "yes" if stage.recompute else "no",
        f"{time_text(each.forward_us)} + {time_text(each.backward_us)}",
        bytes_text(each.used_bytes),
    )


def _moved(this: Deployment, other: Deployment) -> int | None:
    """Number of operators that are in a stage of another number; None if the plans are of different graphs."""
    if this.graph_hash != other.graph_hash:
        return None
    before = {name: number for number, stage in enumerate(other.stages) for name in stage.ops}
    return sum(before.get(name) != number for number, stage in enumerate(this.stages) for name in stage.ops)
