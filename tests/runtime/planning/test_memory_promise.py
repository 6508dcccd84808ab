"""What a plan promised, after memory ran out: per device, also where it has several stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from plan_graphs import chain
from plan_instances import deploy

from rannd.config import Config
from rannd.plan.deployment import Deployment
from rannd.plan.slot_memory import device_bytes, fullest_bytes
from rannd.runtime.comm.world import World
from rannd.runtime.planning import memory_fit
from rannd.runtime.planning.memory_promise import LOWER, MemoryPromise
from rannd.units import amount


def _promise(deployment: Deployment) -> MemoryPromise:
    world = cast(World, SimpleNamespace(device=torch.device("cpu")))
    return MemoryPromise(world, Config(), cast(Any, None), deployment, 1 << 30, None, None)


def test_the_next_plan_gets_less_than_the_device_needed() -> None:
    one = deploy(chain(12, param=100_000), 2, partition_num=2, schedule="1f1b")
    for stage, each in enumerate(one.stages):
        assert _promise(one).marks(stage)["limit"] == int(each.estimate.total_bytes * LOWER)
    assert _promise(one).marks(None)["limit"] == int(fullest_bytes(one) * LOWER)
    assert "and also" not in _promise(one).text(MemoryError("tried to allocate 3 bytes"), 0)

    two = deploy(chain(12, param=100_000), 2, schedule="interleaved_1f1b", virtual_stages="2")
    sizes = device_bytes(two)
    for stage, each in enumerate(two.stages):
        assert sizes[each.slots] > each.estimate.total_bytes
        assert _promise(two).marks(stage)["limit"] == int(sizes[each.slots] * LOWER)
    told = _promise(two).text(MemoryError("tried to allocate 3 bytes"), 1)
    assert f"the plan estimated {amount(sizes[two.stages[1].slots])} for each device with stage 1 and also 3" in told


def test_parameters_that_stay_whole_are_told_apart_with_their_remedy() -> None:
    given: dict[str, Any] = {"zero_stage": "3", "partition_num": 1}
    for reshards in (False, True):
        found = deploy(chain(12, param=100_000), 2, reshard_after_forward=reshards, **given)
        (each,) = (stage.estimate for stage in found.stages)
        told = _promise(found).text(MemoryError("tried to allocate 3 bytes"), 0)
        assert f"operator's backward {amount(each.working_bytes - each.whole_bytes)}, whole parameters" in told
        assert f"whole parameters and gradients of ZeRO {amount(each.whole_bytes)};" in told
        assert ("reshard_after_forward=true" in told) != reshards


def test_a_rank_lacks_what_all_of_its_stages_need() -> None:
    found = deploy(chain(12, param=100_000), 2, schedule="interleaved_1f1b", virtual_stages="2")
    sizes = device_bytes(found)
    for slot in range(2):
        size = sizes[next(slots for slots in sizes if slot in slots)]

        def gathered(numbers: list[int], size: int = size) -> list[list[int]]:
            assert numbers[0] == size
            return [numbers, [0, 0]]

        ranks = SimpleNamespace(
            slot=slot, device=torch.device("cpu"), local_size=1, mates=(0,), gather_numbers=gathered
        )
        assert memory_fit.short(cast(World, ranks), torch.nn.Linear(1, 1), found) is None


def test_a_rank_that_lacks_memory_for_a_change_of_the_plan_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = deploy(chain(12, param=100_000), 2, partition_num=2)
    states = [each.param_bytes + each.grad_bytes + each.optimizer_bytes for each in (s.estimate for s in found.stages)]
    need, first, whole = sum(states), found.stages[0].estimate, states[0]
    assert min(states) > 0
    other = [need]
    ranks = SimpleNamespace(
        device=torch.device("cpu"), local_size=1, mates=(0,), gather_numbers=lambda numbers: [numbers, other]
    )

    small = deploy(chain(2), 2, partition_num=2)

    def short(following: Deployment = small) -> tuple[int, int] | None:
        return memory_fit.short_of_change(cast(World, ranks), found, following)

    monkeypatch.setattr(memory_fit, "free_room", lambda *_: need)
    assert short() is None
    other[0] = need - 1
    assert short() == (need, need - 1)
    other[0] = need
    monkeypatch.setattr(memory_fit, "free_room", lambda *_: need - 2)
    assert short() == (need, need - 2)
    for zero, more in ((1, first.optimizer_bytes), (2, first.grad_bytes), (3, first.param_bytes)):
        stages = (msgspec.structs.replace(found.stages[0], slots=(0, 1)),)
        whole += more
        monkeypatch.setattr(memory_fit, "free_room", lambda *_: 0)
        given = msgspec.structs.replace(found, zero=zero, stages=stages)
        assert memory_fit.short_of_change(cast(World, ranks), given, small) == (whole, 0)
    estimates = [msgspec.structs.replace(first, most_bytes=size) for size in (5 * need, 10 * need)]
    large = msgspec.structs.replace(
        found,
        stages=tuple(msgspec.structs.replace(s, estimate=e) for s, e in zip(found.stages, estimates, strict=True)),
    )
    parameters = sum(stage.estimate.param_bytes for stage in found.stages)
    assert short(large) == (11 * need - parameters, 0), "the new plan has to fit beside what is not a parameter"
