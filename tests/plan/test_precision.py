"""What mixed precision costs a plan: bytes of gradients and state, time of reductions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from plan_graphs import chain
from search.test_planner import deploy

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.plan_options import PlanOptions
from rannd.plan.precision import state_weights


@pytest.mark.parametrize(
    ("itemsize", "options", "expected"),
    [
        (4, {}, (1.0, 2.0, 2.0)),
        (2, {}, (1.0, 2.0, 2.0)),
        (8, {"reduce_dtype": "float32"}, (0.5, 2.0, 2.0)),
        (4, {"reduce_dtype": "bfloat16", "opt_param_factor": 0.0}, (0.5, 2.0, 0.0)),
        (2, {"reduce_dtype": "float32"}, (2.0, 3.0, 2.0)),
        (2, {"master_weights": True}, (2.0, 4.0, 6.0)),
        (2, {"master_weights": True, "reduce_dtype": "bfloat16"}, (1.0, 4.0, 6.0)),
        (4, {"master_weights": True}, (1.0, 2.0, 2.0)),
    ],
)
def test_bytes_per_byte_of_a_parameter(itemsize: int, options: dict[str, Any], expected: tuple[float, ...]) -> None:
    assert state_weights(itemsize, PlanOptions(**options)) == expected


def _halved(graph: TaskGraph) -> TaskGraph:
    return msgspec.structs.replace(
        graph, params=tuple(msgspec.structs.replace(each, itemsize=2) for each in graph.params)
    )


def test_plans_have_the_bytes_and_times() -> None:
    given: dict[str, Any] = {"rows": 1, "max_pipeline": 1, "partition_num": 1, "zero_stage": "0"}
    graph = _halved(chain(4, param=1_000_000))
    plain = deploy(graph, 2, **given)
    masters = deploy(graph, 2, master_weights=True, **given)
    wide, narrow = (deploy(graph, 2, reduce_dtype=each, **given) for each in ("float32", "bfloat16"))
    before, after = plain.stages[0].estimate, masters.stages[0].estimate
    assert after.param_bytes == before.param_bytes
    assert (after.grad_bytes, after.optimizer_bytes) == (2 * before.grad_bytes, 3 * before.optimizer_bytes)
    assert wide.stages[0].estimate.allreduce_us > narrow.stages[0].estimate.allreduce_us
    assert narrow.stages[0].estimate.allreduce_us == before.allreduce_us
    assert masters.step_us == wide.step_us > plain.step_us == narrow.step_us
    shared = deploy(graph, 2, master_weights=True, **{**given, "zero_stage": "1"})
    assert shared.stages[0].estimate.optimizer_bytes * 2 == after.optimizer_bytes
