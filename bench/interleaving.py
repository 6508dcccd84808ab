"""Interleaved stages priced in simulation: the best plan that can be run today beside interleaved 1F1B and ZB-V.

    python bench/interleaving.py [paper half gpt2 zoo] [--models NAME ..] [--blocks 32] [--host-us 30] [--halves 1]
                                 [--draw]

paper   BERT and a widened ResNet152 on 4 nodes with 8 V100 (bench/paper.py)
half    BERT there with autocast to float16
gpt2    GPT-2 of 774 million and 1.5 billion parameters on 4 and 8 of these devices, with small and large batches
zoo     the models of tests/zoo with one loss that do not couple rows, on 4 and 8 devices of cluster cpu on two nodes,
        with 70 % of the memory that one stage would need (as bench/planner.py value)

All plans of a model are made from the same blocks and costs, for the same batch and the same memory; each action, sends
and receives too, takes --host-us of its slot's host (docs/benchmarks.md). Compared are simulated steps. "Plan" is what
a job would get today. The other columns are the fastest of all numbers of positions (slots of a pipeline) with equally
many replicas, microbatches, orders of slots and ZeRO stages, whatever the gain (a job gets ZeRO and zero-bubble only
if they save a twentieth); for 1F1B and zb_h1 the planner's plans count, too. Of interleaved 1F1B v is the number of
stages per slot; it is tried with 0, 1 and 2 forwards more than in the paper. Nothing is run.

Columns: step of the plan; step of each schedule relative to the plan (below 1: faster), GiB on the fullest device, the
shape, and how uneven the cuts are (computing of the slot with most of it / mean); 'none' if nothing fits that could be
faster than --far times the plan. Bold: a schedule that cannot be run is faster by 3 % or more than the fastest of those
that can, 1F1B and zb_h1 whatever the gain.

--blocks   max_partition_num, for all plans
--halves   what B and W take together under zb_h1 and ZB-V, relative to a whole backward (measured: 1.01 to 1.17,
           docs/benchmarks.md); the planner knows nothing of it
--draw     draw the timeline of one pipeline of the fastest plan of each schedule
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _virtual_plans import INTERLEAVED, TODAY, Priced, Workshop
from msgspec.structs import replace

from rannd.config import Config
from rannd.config.cluster import load_cluster
from rannd.errors import DoesNotFitError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import RUNS, RunMode
from rannd.plan.schedule.schedules import DEFAULT_SCHEDULE, DELAYING
from rannd.plan.search.planner import plan
from rannd.plan.simulate.layout import layout_of, loss_layout
from rannd.plan.simulate.simulator import simulate
from rannd.plan.simulate.timeline_drawing import draw
from rannd.profile.analytic import analytic_costs

TESTS = Path(__file__).resolve().parent.parent / "tests"
GIB = 2**30
WIN = 0.97
"""Step relative to the fastest of today from which on interleaving is worth building."""


def main() -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "plan")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*SETTINGS, []], help="settings (default: all)")
    parser.add_argument("--models", nargs="+", help="only models whose name contains one of these")
    parser.add_argument("--blocks", type=int, default=Config().max_partition_num)
    parser.add_argument("--host-us", type=float, default=30.0)
    parser.add_argument(
        "--far", type=float, default=1.1, help="plans that take longer, relative to today's, are left out"
    )
    parser.add_argument("--halves", type=float, default=1.0)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    print("| model | plan today | step | 1F1B | zb_h1 | interleaved 1F1B, v = 2 | v = 4 | ZB-V | time |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in options.what or SETTINGS:
        for model, workshop in SETTINGS[name](options):
            line(model, workshop, options)


# -- settings -------------------------------------------------------------------------------------------------


def _wanted(name: str, options: argparse.Namespace) -> bool:
    return not options.models or any(each in name for each in options.models)


def paper(options: argparse.Namespace) -> Iterator[tuple[str, Workshop]]:
    """The paper's models on its devices."""
    from paper import berts, resnets, traced_graph

    sizes = argparse.Namespace(hidden=[1024, 1536, 2048], layers=[96, 192, 256], sequence=512, attention="sdpa")
    for case in (*berts(sizes, 8), *resnets([8], 16)):
        if _wanted(case.name, options):
            rows = len(next(iter(case.batch.values())))
            yield case.name, _on_v100(traced_graph(case, half=False).task, 32, rows, options)


def half(options: argparse.Namespace) -> Iterator[tuple[str, Workshop]]:
    """The paper's BERT with autocast to float16, where computing is fast and links are not."""
    from paper import berts, traced_graph

    sizes = argparse.Namespace(hidden=[1024, 2048], layers=[24, 96, 192], sequence=512, attention="sdpa")
    for case in berts(sizes, 8):
        if _wanted(case.name, options):
            yield f"{case.name}, float16", _on_v100(traced_graph(case, half=True).task, 32, 8, options)


def gpt2(options: argparse.Namespace) -> Iterator[tuple[str, Workshop]]:
    """GPT-2 on one node."""
    import torch
    import transformers
    from paper import Case, traced_graph

    for width, layers, heads in ((1280, 36, 20), (1600, 48, 25)):
        config = transformers.GPT2Config(
            n_embd=width, n_layer=layers, n_head=heads, n_positions=1024, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        for devices, rows in ((4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4)):
            name = f"GPT-2 {width} x {layers}, {devices} devices, {rows * devices} rows"
            if _wanted(name, options):
                ids = torch.ones(rows, 1024, dtype=torch.long)
                batch = {"input_ids": ids, "labels": ids}
                case = Case(name, lambda config=config: transformers.GPT2LMHeadModel(config), batch)
                yield name, _on_v100(traced_graph(case, half=False).task, devices, rows, options)


def _on_v100(graph: TaskGraph, devices: int, rows: int, options: argparse.Namespace) -> Workshop:
    cluster = load_cluster("v100x8")
    slots = tuple(Slot(*each) for each in cluster.places(devices))
    memory = int(cluster.memory_bytes * (1 - Config().mem_margin))
    return _workshop(graph, "v100x8", slots, rows, memory, options)


def _workshop(
    graph: TaskGraph, name: str, slots: tuple[Slot, ...], rows: int, memory: int, options: argparse.Namespace
) -> Workshop:
    asked = replace(PlanOptions.of(Config()), max_partition_num=options.blocks)
    blocks = make_blocks(Partitioning.of(graph), asked, world=len(slots))
    costs = analytic_costs(
        graph,
        [block.ops for block in blocks],
        load_cluster(name),
        fewest=1 if graph.rows_coupled else -(-rows // asked.max_pipeline),
        most=rows,
        nodes=len({slot.node for slot in slots}),
    )
    return Workshop(graph, blocks, costs, slots, rows, memory, asked, options.host_us, options.halves)


def zoo(options: argparse.Namespace) -> Iterator[tuple[str, Workshop]]:
    """The zoo's models, where memory is scarce."""
    from planner import PART, ROWS, zoo_graphs

    from rannd.plan.search.estimate import Variant

    for name, graph in zoo_graphs():
        if graph.rows_coupled:
            continue
        for devices in (4, 8):
            told = f"{name}, {devices} devices"
            if _wanted(told, options):
                slots = tuple(Slot(*divmod(device, devices // 2)) for device in range(devices))
                ample = _workshop(graph, "cpu", slots, ROWS, 10**15, options)
                table = ample.table(Variant(DEFAULT_SCHEDULE, max(ample.microbatches), "stages"))
                most = table.bytes_needed(0, len(ample.blocks), devices, used=0)
                yield told, _workshop(graph, "cpu", slots, ROWS, int(most * PART), options)


SETTINGS: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, Workshop]]]] = {
    "paper": paper,
    "half": half,
    "gpt2": gpt2,
    "zoo": zoo,
}


# -- a line ---------------------------------------------------------------------------------------------------


def planned(workshop: Workshop, way: RunMode | None) -> Deployment | None:
    """The planner's plan: what a job gets, or of one run mode; None if nothing fits."""
    try:
        return plan(
            workshop.graph,
            workshop.blocks,
            workshop.costs,
            world=workshop.world,
            slots=workshop.slots,
            batch_rows=workshop.rows * workshop.world,
            memory_bytes=workshop.memory,
            options=workshop.options,
            ranked=True,
            way=way,
        )
    except DoesNotFitError:
        return None


def line(model: str, workshop: Workshop, options: argparse.Namespace) -> None:
    """Print the row of a model."""
    begin = time.process_time()
    today = planned(workshop, None)
    if today is None:
        print(f"| {model} | nothing fits |", flush=True)
        return
    reference = workshop.simulated(today)
    step = reference.step_us
    found: dict[str, list[Priced | tuple[float, int, str]]] = {}
    for kind in TODAY:
        own = found.setdefault(kind.name, [])
        schedule = DELAYING[0] if kind.splits else DEFAULT_SCHEDULE
        for way in sorted(each for each in RUNS if each.schedule == schedule):
            other = planned(workshop, way)
            if other is not None:
                played = workshop.simulated(other)
                own.append((played.step_us, max(played.peak_bytes), shape(other)))
    for kind in (*TODAY, *INTERLEAVED):
        below = min([options.far * step, *(_step(each) for each in found.setdefault(kind.name, []))])
        priced = workshop.best(kind, below)
        if priced is not None:
            found[kind.name].append(priced)
    today_us = min([step, *(_step(each) for kind in TODAY for each in found[kind.name])])
    cells = []
    for name, each in found.items():
        fastest = min(each, key=_step, default=None)
        if fastest is None:
            cells.append("none")
            continue
        if isinstance(fastest, Priced):
            text = f"{fastest.most_bytes / GIB:.1f} GiB, {fastest.name}, uneven {fastest.uneven:.2f}"
        else:
            text = f"{fastest[1] / GIB:.1f} GiB, {fastest[2]}"
        mark = "**" if _step(fastest) <= WIN * today_us and name not in {kind.name for kind in TODAY} else ""
        cells.append(f"{mark}{_step(fastest) / step:.3f}{mark} ({text})")
    took = time.process_time() - begin
    plan_text = f"{today.schedule}, {shape(today)}, {max(reference.peak_bytes) / GIB:.1f} GiB"
    print(f"| {model} | {plan_text} | {_seconds(step)} | {' | '.join(cells)} | {took:.0f} s |", flush=True)
    if options.draw:
        for each in found.values():
            for priced in each:
                if isinstance(priced, Priced):
                    _draw(workshop, priced)


def _step(each: Priced | tuple[float, int, str]) -> float:
    return each.step_us if isinstance(each, Priced) else each[0]


def _seconds(us: float) -> str:
    return f"{us / 1e6:.2f} s" if us >= 1e5 else f"{us / 1e3:.2f} ms"


def shape(deployment: Deployment) -> str:
    """Such as '4 x 8, m 8, ZeRO 1, recompute': stages, replicas, microbatches per rank."""
    counts = sorted({len(stage.slots) for stage in deployment.stages})
    parts = [
        f"{len(deployment.stages)} x {'-'.join(map(str, counts))}",
        f"m {deployment.microbatches}",
        f"ZeRO {deployment.zero}" if deployment.zero else "",
        "recompute" if any(stage.recompute for stage in deployment.stages) else "",
    ]
    return ", ".join(filter(None, parts))


def _draw(workshop: Workshop, priced: Priced) -> None:
    """Draw one of the pipelines side by side, its slots in the order of the positions."""
    layout = loss_layout(layout_of(workshop.graph, priced.deployment))
    program = priced.kind.program(layout, priced.costs.split)
    played = simulate(program, priced.costs, record=True)
    first = list(dict.fromkeys(slots[0] for slots in layout.stages))
    events = [replace(event, slot=first.index(event.slot)) for event in played.events if event.slot in first]
    print(f"{priced.kind.name}: {priced.name}, {_seconds(played.step_us)}, bubble {played.bubble:.3f}")
    print(draw(events, len(first), priced.costs.forward_us[0]))


if __name__ == "__main__":
    main()
