"""A deployment as log lines: its estimate, what was not chosen, which ranks run what."""

from __future__ import annotations

from collections.abc import Sequence

from rannd.plan.deployment import Deployment

_GIB = 1024**3


def estimate_lines(deployment: Deployment) -> list[str]:
    """Format the estimate as log lines, as in RaNNC's tutorial: times in microseconds, sizes in bytes."""
    lines = [
        f"Estimated profiles of subgraphs: batch_size={deployment.batch_rows} np={len(deployment.slots)} "
        f"pipeline={deployment.microbatches} use_amp=0 zero={deployment.zero}"
    ]
    for stage in deployment.stages:
        each = stage.estimate
        computing = each.param_bytes + each.grad_bytes + each.activation_bytes + each.working_bytes
        lines.append(
            f"  graph={stage.name} repl={len(stage.slots)} fwd_time={round(each.forward_us)} "
            f"bwd_time={round(each.backward_us)} ar_time={round(each.allreduce_us)} in_size={each.input_bytes} "
            f"out_size={each.output_bytes} fp32param_size={each.param_bytes} fp16param_size=0 "
            f"total_mem={each.used_bytes} (fwd+bwd={computing} "
            f"opt={each.optimizer_bytes} comm={each.comm_bytes})"
        )
    return lines


def alternative_lines(deployment: Deployment) -> list[str]:
    """Format the plans that were not chosen, and the distance from the optimum, as log lines."""
    lines = []
    if deployment.bound_us > 0 and not deployment.searched_all:
        gap = deployment.e_us / deployment.bound_us - 1
        lines.append(f"The search was cut off: a plan whose closed form E is {gap:.1%} smaller may exist")
    for other in deployment.alternatives:
        if other.over_bytes:
            lines.append(f"Not chosen: {other.name}: {other.over_bytes / _GIB:.3g} GiB too much on each device")
        elif deployment.step_us > 0:
            slower = other.step_us / deployment.step_us - 1
            least = "at least " if other.at_least else ""
            lines.append(f"Not chosen: {other.name}: {least}{max(slower, 0.0):.1%} slower")
    return lines


def assignment_lines(deployment: Deployment, ranks: Sequence[int]) -> list[str]:
    """Format which ranks run which stage as log lines; `ranks` is the rank that is bound to each slot."""
    return [
        f"Assigned subgraph {stage.name} to rank[{','.join(str(ranks[slot]) for slot in stage.slots)}]"
        for stage in deployment.stages
    ]
