"""Virtual operations: stages that take equally long with all their replicas, F = B = W."""

from __future__ import annotations

from rannd.plan.schedule.program import Layout
from rannd.plan.simulate.step_costs import StepCosts


def chain(stages: int, microbatches: int, **changes: object) -> Layout:
    """One replica a stage, values to the next stage only."""
    edges = tuple((stage, stage + 1) for stage in range(stages - 1))
    given = {
        "world": stages,
        "microbatches": microbatches,
        "stages": tuple((stage,) for stage in range(stages)),
        "edges": edges,
        "grad_edges": edges,
    }
    return Layout(**(given | changes))  # type: ignore[arg-type]


def virtual(layout: Layout, *, unit: float = 1.0, transfer: float = 0.0, **changes: object) -> StepCosts:
    """A forward takes `unit` times the replicas of its stage, each half of a backward as long; a piece is one byte."""
    forward = tuple(unit * len(slots) for slots in layout.stages)
    zeros = (0,) * len(layout.stages)
    given = {
        "forward_us": forward,
        "backward_us": tuple(2 * us for us in forward),
        "weight_us": forward,
        "values_us": dict.fromkeys(layout.edges, transfer),
        "grads_us": dict.fromkeys(layout.edges, transfer),
        "reduce_us": ((),) * len(layout.stages),
        "tied_us": ((),) * len(layout.tied),
        "state_bytes": zeros,
        "kept_bytes": (1,) * len(layout.stages),
        "weight_bytes": (1,) * len(layout.stages),
        "working_bytes": zeros,
        "values_bytes": dict.fromkeys(layout.edges, 0),
        "grads_bytes": dict.fromkeys(layout.edges, 0),
    }
    return StepCosts(**(given | changes))  # type: ignore[arg-type]
