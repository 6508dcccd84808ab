"""Neighbouring blocks with few gradients are one segment under ZeRO 2 and 3, where what is whole with them fits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from plan_graphs import chain
from plan_instances import deploy

from rannd.plan.deployment import Deployment
from rannd.plan.stage_costs import estimate

PARAM = 60_000
DIVIDED: dict[str, Any] = {"partition_num": 1, "pipeline_num": 4, "offload_optimizer": "false"}


def _ends(found: Deployment) -> list[int]:
    """Operators before the end of each segment of the only stage."""
    (stage,) = found.stages
    changes = [at for at, (one, other) in enumerate(pairwise(stage.segment_of), 1) if one != other]
    return [*changes, len(stage.ops)]


@pytest.mark.parametrize("zero", ["2", "3"])
@pytest.mark.parametrize("reshard", [False, True])
def test_small_neighbours_are_joined_where_memory_suffices(
    monkeypatch: pytest.MonkeyPatch, zero: str, reshard: bool
) -> None:
    graph = chain(12, param=PARAM)
    given = {**DIVIDED, "zero_stage": zero, "reshard_after_forward": reshard}
    monkeypatch.setattr(estimate, "SEGMENT", 0)
    apart = deploy(graph, 4, **given)
    monkeypatch.setattr(estimate, "SEGMENT", 3 * PARAM + 1)
    joined = deploy(graph, 4, **given)
    assert _ends(apart) == list(range(1, 13))
    assert _ends(joined) == [3, 6, 9, 12]
    (many,), (few,) = apart.stages, joined.stages
    # Gradients of a block, of the two before it, and what is received for two; parameters of two blocks or all.
    grads = 1 + 2 + 2 * 3 / 4
    params = {"2": 0, "3": 2 if reshard else 12}[zero]
    assert few.stays_whole == many.stays_whole == (zero == "3" and not reshard)
    assert many.estimate.whole_bytes == (grads + params) * PARAM
    assert few.estimate.whole_bytes == (3 * grads + (params if few.stays_whole else 3 * params)) * PARAM
    grown = few.estimate.total_bytes - many.estimate.total_bytes
    assert grown == few.estimate.whole_bytes - many.estimate.whole_bytes
    for limit, ends in ((few.estimate.total_bytes, _ends(joined)), (few.estimate.total_bytes - 1, _ends(apart))):
        found = deploy(graph, 4, memory=limit, **given)
        assert _ends(found) == ends
        assert found.stages[0].estimate.total_bytes <= limit


def test_by_default_a_segment_has_eight_mebibytes_of_gradients() -> None:
    found = deploy(chain(12, param=3 << 20), 4, zero_stage="2", **DIVIDED)
    assert _ends(found) == [2, 4, 6, 8, 10, 12]
    assert _ends(deploy(chain(12, param=9 << 20), 4, zero_stage="2", **DIVIDED)) == list(range(1, 13))


def test_what_recomputes_is_not_joined() -> None:
    found = deploy(chain(12, param=PARAM), 4, zero_stage="2", checkpointing=True, **DIVIDED)
    assert _ends(found) == list(range(1, 13))


def test_without_divided_gradients_there_is_one_segment() -> None:
    for zero, world in (("1", 4), ("3", 1)):
        found = deploy(chain(12, param=PARAM), world, zero_stage=zero, **DIVIDED)
        assert found.stages[0].segments == (False,)
