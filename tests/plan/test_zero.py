"""What replicas hold, with the optimizer's state in the device's memory and elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plan_graphs import chain
from plan_instances import deploy

from rannd.errors import DoesNotFitError
from rannd.plan.plan_text import plan_line
from rannd.plan.search.planner import PlanOptions
from rannd.plan.zero import ASSUMED_FILE_RATE, ASSUMED_RATES, Trained, held, offload_us


def _trained(each: float) -> Trained:
    return Trained(np.array([each]), np.array([0.0]))


@pytest.mark.parametrize(
    ("zero", "offload", "unit", "here", "elsewhere"),
    [
        (0, 0.0, 10.0, 2000.0, 0.0),
        (0, 30.0, 10.0, 120.0, 2000.0),  # two buckets of 30 bytes of parameters, with twice as much state
        (0, 30.0, 100.0, 400.0, 2000.0),  # a large parameter is a bucket of its own
        (1, 30.0, 100.0, 120.0, 500.0),  # a quarter of it is smaller than a bucket
        (1, 800.0, 10.0, 500.0, 500.0),  # never more than all
    ],
)
def test_two_buckets_of_state_are_on_the_device(
    zero: int, offload: float, unit: float, here: float, elsewhere: float
) -> None:
    trained, state = _trained(1000.0), _trained(2000.0)
    found = held(
        zero,
        np.array([4.0 if zero else 1.0]),
        params=trained.whole,
        trainable=trained,
        gradients=trained,
        optimizer=state,
        unit=np.array([unit]),
        offload=offload,
    )
    assert (found.optimizer[0], found.offloaded[0]) == (here, elsewhere)


def test_a_model_whose_state_does_not_fit_is_planned_with_it_elsewhere() -> None:
    given: dict[str, Any] = {"opt_param_factor": 100.0, "zero_stage": "0", "partition_num": 1, "pipeline_num": 1}
    graph = chain(10, param=60_000_000)  # 600 MB, in blocks of less than a bucket each or more
    memory = 40_000_000_000
    with pytest.raises(DoesNotFitError, match=r"\(offload_optimizer=true\) about \d"):
        deploy(graph, 1, memory=memory, **given)
    found = deploy(graph, 1, memory=memory, offload_optimizer=True, **given)
    each = found.stages[0].estimate
    assert each.offloaded_bytes == 100 * 600_000_000
    assert each.optimizer_bytes < each.offloaded_bytes / 4
    assert each.total_bytes <= memory
    assert "57,221 MiB of optimizer state offloaded" in plan_line(found)


def test_copies_are_in_the_step_as_the_simulator_has_them() -> None:
    given: dict[str, Any] = {"partition_num": 2, "pipeline_num": 4}
    graph = chain(10, param=1_000_000)
    plain = deploy(graph, 2, **given)
    for device, rate in (("cpu", ASSUMED_FILE_RATE), *ASSUMED_RATES.items()):
        found = deploy(graph, 2, offload_optimizer=True, device=device, ranked=True, **given)
        copies = max(stage.estimate.offload_us for stage in found.stages)
        assert copies == pytest.approx(2 * max(stage.estimate.offloaded_bytes for stage in found.stages) / rate)
        assert copies == pytest.approx(float(offload_us(np.array(2.0 * 5_000_000), device)))
        assert found.step_us > plain.step_us
        assert found.e_us == pytest.approx(found.step_us, rel=0.02)


def test_it_is_off() -> None:
    assert not PlanOptions().offload_optimizer
    assert deploy(chain(4, param=1000), 1).stages[0].estimate.offloaded_bytes == 0
