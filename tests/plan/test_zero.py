"""What replicas hold, with the optimizer's state in the device's memory and elsewhere."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest
from plan_graphs import chain
from plan_instances import deploy

from rannd.errors import DeploymentError, DoesNotFitError, PlanError
from rannd.plan.deployment import decode, encode
from rannd.plan.plan_text import plan_line, scaled, show
from rannd.plan.run_modes import Offload
from rannd.plan.stage_costs.estimate import StageTables
from rannd.plan.zero import ASSUMED_FILE_RATE, ASSUMED_RATES, LEAST_OFFLOADED, Trained, WholeBytes, held, offload_us


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
        units=WholeBytes(*(np.array([unit]) for _ in WholeBytes._fields)),
        offload=offload,
    )
    assert (found.optimizer[0], found.offloaded[0]) == (here, elsewhere)


@pytest.mark.parametrize(
    ("zero", "replicas", "away", "working"),
    [
        (0, 1, False, 10.0 + 7.0 + 20.0),
        (1, 4, False, 10.0 + 7.0 + 20.0),
        (2, 1, False, 10.0 + 7.0 + 20.0),
        (2, 4, False, 7.0 + 15.0 + 10.0 + 2 * 0.75 * 10.0),
        (2, 2, False, 7.0 + 15.0 + 10.0 + 2 * 0.5 * 10.0),
        (3, 4, False, 7.0 + 15.0 + 10.0 + 2 * 0.75 * 10.0 + 16.0),
        (3, 1, True, 7.0 + 15.0 + 10.0 + 16.0),
    ],
)
def test_what_is_whole_for_a_block_takes_memory_for_a_while(
    zero: int, replicas: int, away: bool, working: float
) -> None:
    trained = _trained(1000.0)
    units = WholeBytes(*(np.array([each]) for each in (11.0, 16.0, 10.0, 15.0, 7.0)))
    found = held(
        zero,
        np.array([replicas]),
        params=trained.whole,
        trainable=trained,
        gradients=_trained(2000.0),
        optimizer=trained,
        units=units,
        away=away,
        bucket=20.0,
    )
    assert found.working[0] == working


LARGE: dict[str, Any] = {"opt_param_factor": 100.0, "zero_stage": "0", "partition_num": 1, "pipeline_num": 1}
"""One stage whose optimizer has 60 GB of state."""


def test_a_model_whose_state_does_not_fit_is_planned_with_it_elsewhere() -> None:
    graph = chain(10, param=60_000_000)  # 600 MB, in blocks of less than a bucket each or more
    memory = 40_000_000_000
    with pytest.raises(DoesNotFitError, match=r"With offload_optimizer=true, \d"):
        deploy(graph, 1, memory=memory, offload_optimizer="false", **LARGE)
    found = deploy(graph, 1, memory=memory, ranked=True, **LARGE)
    assert found.offload
    each = found.stages[0].estimate
    assert each.offloaded_bytes == 100 * 600_000_000
    assert each.optimizer_bytes < each.offloaded_bytes / 4
    assert each.total_bytes <= memory
    assert "57,221 MiB of optimizer state offloaded" in plan_line(found)
    forced = deploy(graph, 1, memory=memory, offload_optimizer="true", ranked=True, **LARGE)
    assert (forced.stages, forced.step_us) == (found.stages, found.step_us)
    with pytest.raises(PlanError, match="offload_optimizer=True; use one of auto, true, false"):
        deploy(graph, 1, offload_optimizer=True)


def test_state_is_elsewhere_only_if_nothing_else_fits() -> None:
    graph = chain(10, param=60_000_000)
    with pytest.raises(DoesNotFitError) as caught:
        deploy(graph, 1, memory=1, offload_optimizer="false", **LARGE)
    least = caught.value.needed
    assert not deploy(graph, 1, memory=least, **LARGE).offload
    assert deploy(graph, 1, memory=least - 1, **LARGE).offload
    # two devices can share the state instead
    shared = deploy(graph, 2, memory=least * 3 // 5, **{**LARGE, "zero_stage": "auto"})
    assert (shared.zero > 0, shared.offload) == (True, False)
    alone = deploy(graph, 2, memory=least * 3 // 5, **LARGE)
    assert (alone.zero, alone.offload) == (0, True)


def test_tables_with_state_elsewhere_are_made_only_where_nothing_else_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    init = StageTables.__init__

    def noted(self: StageTables, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self.offload != Offload())

    monkeypatch.setattr(StageTables, "__init__", noted)
    deploy(chain(8, param=100_000), 4, memory=2_000_000, ranked=True)
    assert made
    assert not any(made)
    deploy(chain(10, param=60_000_000), 1, memory=40_000_000_000, ranked=True, **LARGE)
    assert any(made)


def test_copies_are_in_the_step_as_the_simulator_has_them() -> None:
    given: dict[str, Any] = {"partition_num": 2, "pipeline_num": 4}
    graph = chain(10, param=1_000_000)
    plain = deploy(graph, 2, **given)
    for device, rate in (("cpu", ASSUMED_FILE_RATE), *ASSUMED_RATES.items()):
        found = deploy(graph, 2, offload_optimizer="true", device=device, ranked=True, **given)
        copies = max(stage.estimate.offload_us for stage in found.stages)
        assert copies == pytest.approx(2 * max(stage.estimate.offloaded_bytes for stage in found.stages) / rate)
        assert copies == pytest.approx(float(offload_us(np.array(2.0 * 5_000_000), device)))
        assert found.step_us > plain.step_us
        assert found.e_us == pytest.approx(found.step_us, rel=0.02)


def test_nothing_is_offloaded_where_memory_is_plenty() -> None:
    assert deploy(chain(4, param=1000), 1).stages[0].estimate.offloaded_bytes == 0


SMALL: dict[str, Any] = {"opt_param_factor": 0.0, "partition_num": 1, "pipeline_num": 1}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parameters_are_elsewhere_only_if_nothing_else_fits(device: str) -> None:
    """With gradients where files are mapped; on a GPU these stay."""
    graph = chain(10, param=60_000_000)
    with pytest.raises(DoesNotFitError, match="With offload_params=true, ") as caught:
        deploy(graph, 1, memory=1, offload_params="false", device=device, **SMALL)
    least = caught.value.needed
    kept = deploy(graph, 1, memory=least, device=device, ranked=True, **SMALL)
    assert not kept.offload_params
    found = deploy(graph, 1, memory=least - 1, device=device, ranked=True, **SMALL)
    # a GPU's step has copies of all parameters, or of two buckets if state comes by buckets
    assert (found.offload_params, found.zero, found.offload) == (True, 3, device == "cuda")
    assert decode(encode(found)) == found
    each = found.stages[0].estimate
    size, grads = 600_000_000, kept.stages[0].estimate.grad_bytes
    assert each.offloaded_bytes == size + (grads if device == "cpu" else 0)
    assert (each.param_bytes, each.grad_bytes) == (0, 0 if device == "cpu" else grads)
    assert each.working_bytes >= 3 * 60_000_000, "whole gradients of a block, its parameters and the next one's"
    assert each.fetch_us == pytest.approx(size / ASSUMED_RATES.get(device, ASSUMED_FILE_RATE))
    assert "MiB of training state offloaded" in plan_line(found)
    assert found.step_us > kept.step_us


def test_settings_that_offloaded_parameters_contradict_are_named() -> None:
    for items in ({"zero_stage": "1"}, {"schedule": "zb_h1"}):
        with pytest.raises(PlanError, match="offload_params=true divides parameters as zero_stage=3 does"):
            deploy(chain(4), 1, offload_params="true", **items)
    assert deploy(chain(4, param=1000), 1, offload_params="true", zero_stage="3").offload_params
    with pytest.raises(PlanError, match="offload_params='yes'; use one of auto, true, false"):
        deploy(chain(4), 1, offload_params="yes")
    found = deploy(chain(4, param=1000), 1, offload_params="true")
    with pytest.raises(DeploymentError, match="it offloads parameters with ZeRO stage 1, not 3"):
        decode(encode(msgspec.structs.replace(found, zero=1)))


def test_state_goes_before_parameters() -> None:
    """The step changes all of the optimizer's state once, and each microbatch reads all parameters twice."""
    graph = chain(10, param=60_000_000)
    with pytest.raises(DoesNotFitError) as caught:
        deploy(graph, 1, memory=1, offload_optimizer="false", offload_params="false", partition_num=1, pipeline_num=1)
    least = caught.value.needed
    given: dict[str, Any] = {"partition_num": 1, "pipeline_num": 1}
    found = [deploy(graph, 1, memory=int(least * share), **given) for share in (1.0, 0.9, 0.6, 0.3)]
    told = [(each.offload, each.offload_params) for each in found]
    assert told == [(False, False), (True, False), (False, True), (True, True)]


IN_MEMORY: dict[str, Any] = {"offload_optimizer": "false", "offload_params": "false"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_activations_are_elsewhere_only_if_nothing_else_fits(device: str) -> None:
    graph = chain(20, param=1000, size=100_000.0)  # 6.4 MB between blocks
    given: dict[str, Any] = {"partition_num": 1, "pipeline_num": 1, "device": device, "activation": 3e5}
    with pytest.raises(DoesNotFitError, match="With offload_activations=true, ") as caught:
        deploy(graph, 1, memory=1, offload_activations="false", **given, **IN_MEMORY)
    least = caught.value.needed
    kept = deploy(graph, 1, memory=least, ranked=True, **given, **IN_MEMORY)
    assert (kept.offload_activations, kept.stages[0].recompute) == (False, True)
    memory = least - 10**6  # more than all of the training state
    found = deploy(graph, 1, memory=memory, ranked=True, **given)
    assert found.offloads == (False, False, True)
    assert decode(encode(found)) == found
    (stage,) = found.stages
    assert all(stage.segments)
    away = 19 * 6_400_000
    assert stage.estimate.offloaded_bytes == pytest.approx(away)
    assert stage.estimate.total_bytes <= memory
    assert "116 MiB of activations offloaded" in plan_line(found)
    why = {each.what: each.why for each in found.reasons}
    assert re.match(r"without it \S+ \S+ of each device would be needed", why["offload activations"])
    copies = 2 * away / ASSUMED_RATES.get(device, ASSUMED_FILE_RATE)
    repeated = kept.stages[0].estimate.backward_us - found.stages[0].estimate.backward_us + copies / 2
    assert found.step_us == pytest.approx(kept.step_us - repeated + copies, rel=0.02)
    assert found.e_us == pytest.approx(found.step_us, rel=0.02)


def test_what_is_asked_for_is_offloaded_though_memory_is_plenty() -> None:
    graph = chain(8, param=1000, size=100_000.0)
    given: dict[str, Any] = {"pipeline_num": 2, "activation": 3e5, "offload_activations": "true", "ranked": True}
    found = deploy(graph, 2, partition_num=2, **given)
    several = deploy(graph, 2, virtual_stages="2", **given)
    for each in (found, several):
        assert each.offload_activations
        assert all(all(stage.segments) for stage in each.stages)
        assert sum(stage.estimate.offloaded_bytes for stage in each.stages) > 4 * LEAST_OFFLOADED
        why = {reason.what: (reason.chosen, reason.why) for reason in each.reasons}
        assert why["offload activations"] == ("yes", "set by offload_activations=true")
        assert why["recompute"] == ("yes", "set by offload_activations=true")


def test_a_stage_that_fits_keeps_its_activations() -> None:
    given: dict[str, Any] = {"partition_num": 2, "pipeline_num": 4, "schedule": "1f1b", "activation": 1.1e5}
    graph = chain(40, param=1000, size=100_000.0)
    with pytest.raises(DoesNotFitError) as caught:
        deploy(graph, 2, memory=1, offload_activations="false", **given, **IN_MEMORY)
    memory = caught.value.needed - 1
    found = deploy(graph, 2, memory=memory, ranked=True, **given, **IN_MEMORY)
    assert found.offload_activations
    first, last = found.stages
    assert first.estimate.in_flight > last.estimate.in_flight
    assert all(first.segments)
    assert first.estimate.offloaded_bytes > memory / 2
    assert (last.segments, last.estimate.offloaded_bytes) == ((False,), 0)
    assert all(stage.estimate.total_bytes <= memory for stage in found.stages)


DIVIDED: dict[str, Any] = {"zero_stage": "3", "partition_num": 1, "pipeline_num": 4, "ranked": True, **IN_MEMORY}
"""One stage under ZeRO 3, in whose step gathering takes more than computing."""


def test_parameters_stay_whole_until_the_last_microbatch_where_memory_suffices() -> None:
    graph, param = chain(10, param=60_000_000), 60_000_000
    kept = deploy(graph, 2, **DIVIDED)
    freed = deploy(graph, 2, reshard_after_forward=True, **DIVIDED)
    (one,), (other,) = kept.stages, freed.stages
    assert (one.stays_whole, other.stays_whole) == (True, False)
    # Two neighbours are whole anyway.
    two = 2 * math.ceil(10 / len(set(other.segment_of))) * param
    assert one.estimate.total_bytes - other.estimate.total_bytes == 10 * param - two
    assert kept.step_us < 0.8 * freed.step_us
    assert (kept.e_us, freed.e_us) == pytest.approx((kept.step_us, freed.step_us), rel=1e-3)
    for limit, whole in ((one.estimate.total_bytes, True), (one.estimate.total_bytes - 1, False)):
        found = deploy(graph, 2, memory=limit, **DIVIDED)
        assert found.stages[0].stays_whole == whole
        assert found.stages[0].estimate.total_bytes <= limit
    assert decode(encode(kept)) == kept
    assert "1f1b, ZeRO 3 (parameters whole until the last microbatch); " in show(kept)
    assert "1f1b, ZeRO 3; " in show(freed)
    # The whole does not grow with the rows.
    grown = scaled(kept, 4 * kept.batch_rows).stages[0].estimate
    assert one.estimate.whole_bytes > 5 * param
    assert grown.working_bytes - one.estimate.whole_bytes == 4 * (one.estimate.working_bytes - one.estimate.whole_bytes)
    for wrong, text in (({"zero": 2}, "with ZeRO stage 2 and 2 replicas"), ({"offload_params": True}, "offloaded")):
        with pytest.raises(DeploymentError, match=rf"parameters of stages\[0\] stay whole for a while, .*{text}"):
            decode(encode(msgspec.structs.replace(kept, **wrong)))


def test_parameters_that_are_offloaded_are_let_go_of() -> None:
    found = deploy(chain(10, param=60_000_000), 2, **{**DIVIDED, "offload_params": "true"})
    assert found.offload_params
    assert not found.stages[0].stays_whole


def test_where_recomputing_makes_room_parameters_do_not_take_it() -> None:
    graph = chain(10, param=600_000)
    given = {**DIVIDED, "activation": 3e5, "offload_activations": "false"}
    plain = deploy(graph, 2, **given)
    assert plain.stages[0].stays_whole
    less = deploy(graph, 2, memory=plain.stages[0].estimate.total_bytes * 2 // 3, **given)
    assert less.stages[0].recompute
    assert not less.stages[0].stays_whole
    # Asked for, it makes no room, and they may have it.
    assert deploy(graph, 2, checkpointing=True, **given).stages[0].stays_whole
