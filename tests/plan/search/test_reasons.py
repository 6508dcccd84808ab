"""Why a plan has what it has, as it is shown."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from plan_graphs import chain, transformer
from plan_instances import WHAT, deploy

from rannd.errors import DoesNotFitError
from rannd.plan.deployment import Deployment, Reason, decode, encode
from rannd.plan.plan_text import show


def _why(found: Deployment) -> dict[str, tuple[str, str]]:
    assert [each.what for each in found.reasons] == WHAT
    assert decode(encode(found)) == found
    for each in found.reasons:
        assert any(line.split() == f"{each.what} {each.chosen} {each.why}".split() for line in show(found).splitlines())
        assert len(each.why) < 200
    return {each.what: (each.chosen, each.why) for each in found.reasons}


def test_what_was_slower_is_told_as_the_alternatives_have_it() -> None:
    found = deploy(chain(8, param=100_000), 4, ranked=True)
    why = _why(found)
    assert all(each.at_least for each in found.alternatives)
    two, four = (math.floor((each.step_us / found.step_us - 1) * 1000) / 1000 for each in found.alternatives)
    assert why["stages"] == ("1", f"2 stages at least {two:.1%} slower, 4 stages at least {four:.1%} slower")
    assert why["schedule"] == ("1f1b", "one stage waits for nobody")
    assert why["ZeRO"] == ("no", "memory is not scarce: all fits without")
    assert why["offload"] == why["offload params"] == ("no", "a plan without it fits")
    assert why["recompute"] == ("no", "all activations fit")
    assert deploy(chain(8, param=100_000), 4).reasons == (), "nothing was compared"


def test_what_did_not_fit_is_told_with_what_it_lacks() -> None:
    found = deploy(chain(8, param=100_000), 4, memory=2_000_000, ranked=True, zero_stage="0", virtual_stages="1")
    why = _why(found)
    assert why["stages"] == ("4", "2 stages 512 KiB too much, 1 stage 2.9 MiB too much")
    assert why["ZeRO"] == ("no", "set by zero_stage=0")
    chosen, microbatches = why["microbatches"]
    assert chosen == "32"
    assert microbatches.startswith("of the same stages, by estimate: 16 microbatches ")
    assert why["schedule"][1].startswith("zb_h1 ")


def test_what_was_set_is_told_by_its_name() -> None:
    given: dict[str, Any] = {"partition_num": 2, "pipeline_num": 4, "schedule": "gpipe", "zero_stage": "1"}
    why = _why(deploy(chain(8), 4, ranked=True, offload_optimizer="true", checkpointing=True, **given))
    assert [why[what] for what in WHAT[:5]] == [
        ("2", "set by partition_num=2"),
        ("4", "set by pipeline_num=4"),
        ("gpipe", "set by schedule=gpipe"),
        ("1", "set by zero_stage=1"),
        ("yes", "set by offload_optimizer=true"),
    ]
    assert why["recompute"] == ("yes", "set by checkpointing=true")
    assert _why(deploy(chain(8), 1, ranked=True))["stages"] == ("1", "there is one device")
    cannot = _why(deploy(chain(8), 1, ranked=True, offload_optimizer="false", steps_apart=False))
    assert cannot["offload"] == ("no", "no optimizer, or one that cannot step some parameters after others")


def test_offload_is_told_with_the_memory_that_all_else_needs() -> None:
    given: dict[str, Any] = {"opt_param_factor": 40.0, "pipeline_num": 1}
    graph = chain(10, param=60_000_000)
    with pytest.raises(DoesNotFitError) as caught:
        deploy(graph, 2, memory=1, offload_optimizer="false", offload_params="false", **given)
    needed, limit = caught.value.needed, caught.value.needed // 2
    chosen, why = _why(deploy(graph, 2, memory=limit, ranked=True, **given))["offload"]
    assert chosen == "yes"
    assert why == (
        f"without it {needed / 2**30:.4g} GiB of each device would be needed, {limit / 2**30:.4g} GiB are allowed"
    )


def test_zero_is_told_with_what_a_plan_without_it_lacks_or_takes() -> None:
    given: dict[str, Any] = {"rows": 1, "max_pipeline": 1, "ranked": True}
    chosen, why = _why(deploy(chain(1, param=1_000_000), 2, memory=6_100_000, **given))["ZeRO"]
    assert chosen in ("1", "2", "3")
    assert why == "without it 6.677 MiB of each device would be needed, 5.817 MiB are allowed"
    kept = _why(deploy(transformer(12), 4, memory=8_000_000, ranked=True))["ZeRO"]
    assert kept[0] == "no"
    assert kept[1].startswith("ZeRO ")
    assert "(5% are asked for)" in kept[1]


def test_recomputing_is_told_with_what_each_stage_would_need() -> None:
    graph = transformer(6)
    plenty = deploy(graph, 2, partition_num=2, pipeline_num=1, zero_stage="0")
    most = max(stage.estimate.total_bytes for stage in plenty.stages)
    found = deploy(graph, 2, memory=int(most * 0.9), partition_num=2, pipeline_num=1, zero_stage="0", ranked=True)
    again = [number for number, stage in enumerate(found.stages) if stage.recompute]
    assert again
    chosen, why = _why(found)["recompute"]
    assert chosen == f"{len(again)} of 2 stages"
    assert all(f"stage {number} would need " in why for number in again)


def test_reasons_from_a_file_do_nothing_to_a_terminal() -> None:
    found = deploy(chain(8), 2, ranked=True)
    bad = tuple(Reason("\x1b[2J", "a\nb", "x\r" * 500) for _ in range(1000))
    text = show(msgspec.structs.replace(found, reasons=bad))
    assert all(letter.isprintable() for letter in text.replace("\n", ""))
    assert len(text.splitlines()) < 60
