"""BERT on the devices of RaNNC's paper, as bench/interleaving.py prices it."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from rannd.plan.deployment import decode, encode
from rannd.plan.run_modes import VIRTUAL_GAIN
from rannd.plan.schedule.instructions import Posting
from rannd.plan.schedule.program_checker import check
from rannd.plan.schedule.schedules import planned_program
from rannd.plan.schedule.stream_checker import StreamRules, check_streams
from rannd.plan.simulate.layout import layout_of, loss_layout
from rannd.plan.virtual.virtual_plans import HOST_US

BENCH = Path(__file__).parents[3] / "bench"
LAYERS = 24
PART = LAYERS / 192
"""Of the devices' memory, so that so few layers fill it as 192 fill all of it."""


@pytest.mark.full
def test_a_plan_for_bert_is_the_best_that_the_bench_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setattr(sys, "argv", ["interleaving.py"])
    import interleaving
    import paper

    sizes = argparse.Namespace(hidden=[1024], layers=[LAYERS], sequence=512, attention="sdpa")
    case = next(iter(paper.berts(sizes, 8)))
    options = argparse.Namespace(blocks=32, host_us=HOST_US, halves=1.0)
    bench = interleaving._on_v100(paper.traced_graph(case, half=False).task, 32, 8, options)
    bench = dataclasses.replace(bench, memory=int(bench.memory * PART))

    one = bench.planned(replace(bench.options, virtual_stages="1"))
    free = bench.planned(bench.options)
    assert one is not None
    assert free is not None
    assert free.schedule == interleaving.ZB_V
    assert free.step_us < (1 - VIRTUAL_GAIN) * one.step_us
    found = bench.best(free.schedule, 2, below=2 * one.step_us)
    assert found is not None
    assert bench.step_us(free) <= 1.01 * found[0], "another ZeRO stage may be faster, but not by what is asked for"

    assert decode(encode(free)) == free
    layout = loss_layout(layout_of(bench.graph, free))
    split = {number for number, stage in enumerate(free.stages) if stage.estimate.weight_us > 0}
    program = planned_program(free.schedule, layout, split)
    check(program)
    check_streams(program, Posting.MATCHED, StreamRules())
