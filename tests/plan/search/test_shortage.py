"""The error where no plan fits: each number in it suffices, and nothing less does."""

from __future__ import annotations

import re
from typing import Any

import pytest
from plan_graphs import chain
from plan_instances import deploy

from rannd.errors import DoesNotFitError

UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
NONE: dict[str, Any] = {"zero_stage": "0", "offload_optimizer": "false", "offload_params": "false"}
PARAMS = "offload_params=true and zero_stage=3"
MOST = f"{PARAMS} and offload_optimizer=true"
STATE: dict[str, Any] = {"opt_param_factor": 40.0, "partition_num": 1, "pipeline_num": 1}
"""One stage, with much state of the optimizer, of which two buckets are small."""
GRAPH = chain(10, param=60_000_000)


def _would_do(world: int, **items: object) -> dict[str, float]:
    """The settings that an error names, with their bytes."""
    with pytest.raises(DoesNotFitError) as caught:
        deploy(GRAPH, world, memory=1_000_000, **items)
    found = re.findall(r"With ([\w=]+(?: and [\w=]+)*), (\S+) (\w+) would do\.", str(caught.value))
    assert len(found) == str(caught.value).count("would do")
    return {setting: float(number) * UNITS[unit] for setting, number, unit in found}


def test_what_would_help_is_named_with_its_memory() -> None:
    given = {**STATE, **NONE}
    told = _would_do(2, **given)
    assert list(told) == ["zero_stage=3", "offload_optimizer=true", MOST]
    for setting, size in told.items():
        changed = {**given, **dict(each.split("=") for each in setting.split(" and "))}
        assert deploy(GRAPH, 2, memory=int(size), **changed).stages
        with pytest.raises(DoesNotFitError):
            deploy(GRAPH, 2, memory=int(size * 0.99), **changed)
    assert min(told.values()) == next(size for setting, size in told.items() if " and " in setting)


def test_what_does_not_help_or_cannot_be_is_not_named() -> None:
    assert list(_would_do(1, **STATE, **NONE)) == ["offload_optimizer=true", MOST], "one device has no replicas"
    assert list(_would_do(2, **{**STATE, **NONE, "partition_num": 2})) == ["offload_optimizer=true", MOST]
    assert list(_would_do(1, **{**STATE, **NONE, "opt_param_factor": 0.0})) == [PARAMS], "there is no state"
    assert _would_do(2, **STATE) == {}, "the planner has tried all"
    assert list(_would_do(2, **STATE, **NONE, divides=False, steps_apart=False)) == []
    assert list(_would_do(2, **STATE, **NONE, steps_apart=False)) == ["zero_stage=3", PARAMS]


def test_the_largest_block_is_named_by_its_modules() -> None:
    with pytest.raises(
        DoesNotFitError,
        match=r"recomputing, ZeRO 3, offload_optimizer and offload_params included.* \(layers\.\d.*\) needs most",
    ):
        deploy(GRAPH, 1, memory=1_000_000, **STATE)
