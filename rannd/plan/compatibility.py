"""Checks whether a deployment fits a job: differences that make it wrong, and those that only make it slow.

| difference | result |
| --- | --- |
| the graph, the number of ranks, an unknown schedule, slots of stages that are not as it needs them | DeploymentError |
| more microbatches than the batch has rows | DeploymentError |
| distribution of ranks over nodes, device model, rows of the batch, versions, costs that were not measured | warning |

Formats are checked by :func:`rannd.plan.deployment.decode`; free memory is checked on each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rannd.errors import DeploymentError
from rannd.plan.deployment import Deployment, Provenance, Slot
from rannd.plan.run_modes import SCHEDULES, runnable_zero
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES

_AGAIN = "run without it to plan again"


def check_belongs(deployment: Deployment, *, graph_hash: str, world: int, rows: int) -> None:
    """Raise DeploymentError if `deployment` cannot run the graph with hash `graph_hash` on `world` ranks.

    `rows`: rows of this job's global batch.
    """
    if deployment.graph_hash != graph_hash:
        raise DeploymentError(
            f"the deployment was made for the graph {plain(deployment.graph_hash)[:12]}, this model's is "
            f"{graph_hash[:12]}: another model, other shapes, another mode (training, autocast), or tensors in another "
            "order (those that a call gives by keyword come last, in the order of their names); call the model as when "
            f"the deployment was saved, or {_AGAIN}"
        )
    if len(deployment.slots) != world:
        raise DeploymentError(
            f"the deployment was made for {len(deployment.slots)} ranks, this job has {world}; start "
            f"{len(deployment.slots)} ranks, or {_AGAIN}"
        )
    if deployment.microbatches > max(rows, 1):  # a program is made of them before any row is seen
        raise DeploymentError(
            f"the deployment has {deployment.microbatches} microbatches, but the batch of this call has {rows} rows; "
            f"call the model with a larger batch first, or {_AGAIN}"
        )
    known = (*SCHEDULES, *VIRTUAL_SCHEDULES)
    if deployment.schedule not in known:
        raise DeploymentError(
            f"the deployment runs the schedule {plain(deployment.schedule)!r}, this version of rannd supports "
            f"{', '.join(known)}; {_AGAIN}"
        )
    problem = _placement_problem(deployment)
    if problem:
        raise DeploymentError(f"the deployment is damaged: {problem}; {_AGAIN}")
    if deployment.zero not in runnable_zero(deployment.schedule):
        raise DeploymentError(f"the deployment has ZeRO stage {deployment.zero}, which this rannd cannot run; {_AGAIN}")


def _placement_problem(deployment: Deployment) -> str:
    """What the schedule does not allow of the slots of the stages, or ''."""
    stages = tuple(stage.slots for stage in deployment.stages)
    virtual = VIRTUAL_SCHEDULES.get(deployment.schedule)
    if virtual is not None:
        return plain(virtual.problem(stages), 200)
    passes = sum(map(len, stages)) // len(deployment.slots)
    if passes > 1:
        return f"it has {passes} stages per slot, the schedule {deployment.schedule} runs one"
    return ""


def differences(deployment: Deployment, *, here: Provenance, slots: Sequence[Slot], rows: int) -> list[str]:
    """Describe how a job differs from what the deployment was planned for; it runs, but may be slow.

    Args:
        deployment: The deployment to run.
        here: Provenance of a deployment made in this job.
        slots: Slots of this job.
        rows: Rows of this job's global batch.
    """
    found = []
    planned, there = (_spread(each) for each in (deployment.slots, slots))
    if planned != there:
        found.append(f"it was planned for {planned}, this job has {there}")
    if deployment.batch_rows != rows:
        found.append(f"it was planned for a global batch of {deployment.batch_rows} rows, this call has {rows}")
    made = deployment.made
    if made is None:
        return found
    if made.device != here.device:
        found.append(f"it was planned for the device {plain(made.device)!r}, this job has {here.device!r}")
    if made.costs != here.costs:
        found.append(f"its times are from {plain(made.costs)}, not measured")
    for name, theirs, ours in (("rannd", made.rannd, here.rannd), ("torch", made.torch, here.torch)):
        if theirs != ours:
            found.append(f"it was planned with {name} {plain(theirs)}, this is {ours}")
    return found


def plain(text: str, most: int = 80) -> str:
    """Make text from a file printable: one line, no control characters, at most `most` characters."""
    text = "".join(letter if letter.isprintable() else "?" for letter in text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 2]}.."


def _spread(slots: Sequence[Slot]) -> str:
    counts = list(Counter(slot.node for slot in slots).values())
    if len(counts) == 1:
        return f"{counts[0]} ranks on one node"
    told = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    return f"{len(counts)} nodes of {told} ranks"
