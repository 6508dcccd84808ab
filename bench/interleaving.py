"""Interleaved stages priced in simulation: the best plan with one stage per slot beside interleaved 1F1B and ZB-V.

    python bench/interleaving.py [paper half gpt2 zoo] [--models NAME ..] [--blocks 32] [--host-us 32] [--halves 1]
                                 [--draw]

paper   BERT and a widened ResNet152 on 4 nodes with 8 V100 (bench/paper.py)
half    BERT there with autocast to float16
gpt2    GPT-2 of 774 million and 1.5 billion parameters on 4 and 8 of these devices, with small and large batches
zoo     the models of tests/zoo with one loss that do not couple rows, on 4 and 8 devices of cluster cpu on two nodes,
        with 70 % of the memory that one stage would need (as bench/planner.py value)

All plans of a model are made from the same blocks and costs, for the same batch and the same memory; each action, sends
and receives too, takes --host-us of its slot's host (docs/benchmarks.md). Compared are simulated steps. "One per slot"
is what a job gets with virtual_stages=1, "chosen" what it gets with auto. The other columns are the fastest of all
numbers of positions (slots of a pipeline) with equally many replicas, microbatches, orders of slots and ZeRO stages,
whatever the gain: auto tries only the most promising of these, and wants a gain (docs/planning.md). Nothing is run.

Columns: step of the plan with one stage per slot; step of each schedule relative to it (below 1: faster), GiB on the
fullest device, and the shape; 'none' if nothing fits that could be faster than --far times the plan; CPU time of
planning with one stage per slot, with auto, and of all. Bold: faster by 3 % or more.

--blocks   max_partition_num, for all plans
--halves   what B and W take together under zb_h1 and ZB-V, relative to a whole backward (measured: 1.01 to 1.17,
           docs/benchmarks.md); the planner knows nothing of it
--draw     draw the timeline of one pipeline of the fastest plan of each schedule
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from _results import Table
from msgspec.structs import replace

from rannd.config import Config
from rannd.config.cluster import load_cluster
from rannd.errors import DoesNotFitError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block, make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.run_modes import VIRTUAL_GAIN
from rannd.plan.schedule.schedules import DEFAULT_SCHEDULE, DELAYING, planned_program
from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES, ZB_V
from rannd.plan.search.planner import microbatch_counts, plan
from rannd.plan.simulate.layout import layout_of, loss_layout
from rannd.plan.simulate.simulator import predict, simulate
from rannd.plan.simulate.step_costs import StepCosts
from rannd.plan.simulate.timeline_drawing import draw
from rannd.plan.slot_memory import fullest_bytes, stages_by_slots
from rannd.plan.virtual.virtual_asked import VirtualAsked, shapes_of
from rannd.plan.virtual.virtual_plans import HOST_US, VirtualPlans
from rannd.plan.virtual.virtual_search import SLACK, least_us
from rannd.plan.virtual.virtual_shapes import PASSES, has_passes
from rannd.profile.analytic import analytic_costs
from rannd.profile.costs import CostTable

TESTS = Path(__file__).resolve().parent.parent / "tests"
GIB = 2**30
WIN = 1 - VIRTUAL_GAIN
KINDS = [(name, passes) for name in VIRTUAL_SCHEDULES for passes in PASSES if has_passes(name, passes)]
ZEROS = (0, 1, 2, 3)


def main() -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "plan")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*SETTINGS, []], help="settings (default: all)")
    parser.add_argument("--models", nargs="+", help="only models whose name contains one of these")
    parser.add_argument("--blocks", type=int, default=Config().max_partition_num)
    parser.add_argument("--host-us", type=float, default=HOST_US)
    parser.add_argument(
        "--far", type=float, default=1.1, help="plans that take longer, relative to one stage per slot, are left out"
    )
    parser.add_argument("--halves", type=float, default=1.0)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    heads = ["model", "one per slot", "step", "chosen", *(f"{name}, v = {passes}" for name, passes in KINDS), "time"]
    for name in options.what or SETTINGS:
        table = Table(f"Several stages on a slot, setting {name} (simulated)", *heads)
        for model, workshop in SETTINGS[name](options):
            line(table, model, workshop, options)


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
    from planner import PART, ROWS, Case, zoo_graphs

    from rannd.plan.stage_costs.variant import Variant

    for name, graph in zoo_graphs():
        if graph.rows_coupled:
            continue
        for devices in (4, 8):
            told = f"{name}, {devices} devices"
            if _wanted(told, options):
                slots = tuple(Slot(*divmod(device, devices // 2)) for device in range(devices))
                ample = _workshop(graph, "cpu", slots, ROWS, 10**15, options)
                case = Case(graph, ample.blocks, ample.costs, ample.memory, slots, ROWS * devices)
                table = case.tables(Variant(DEFAULT_SCHEDULE, max(case.microbatches), "stages"), recompute=False)
                most = table.bytes_needed(0, len(ample.blocks), devices, used=0)
                yield told, _workshop(graph, "cpu", slots, ROWS, int(most * PART), options)


SETTINGS: dict[str, Callable[[argparse.Namespace], Iterator[tuple[str, Workshop]]]] = {
    "paper": paper,
    "half": half,
    "gpt2": gpt2,
    "zoo": zoo,
}


# -- a line ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workshop:
    """One model on some devices: what all plans for it share."""

    graph: TaskGraph
    blocks: tuple[Block, ...]
    costs: CostTable
    slots: tuple[Slot, ...]
    rows: int
    """Rows of a rank's mini-batch."""
    memory: int
    """Bytes of a device that a plan may use."""
    options: PlanOptions
    host_us: float
    halves: float

    @cached_property
    def plans(self) -> VirtualPlans:
        return VirtualPlans(
            self.graph,
            self.blocks,
            self.costs,
            self.slots,
            batch_rows=self.rows * len(self.slots),
            memory_bytes=self.memory,
            options=self.options,
        )

    def planned(self, options: PlanOptions) -> Deployment | None:
        """What a job gets; None if nothing fits."""
        try:
            return plan(
                self.graph,
                self.blocks,
                self.costs,
                world=len(self.slots),
                slots=self.slots,
                batch_rows=self.rows * len(self.slots),
                memory_bytes=self.memory,
                options=options,
                ranked=True,
            )
        except DoesNotFitError:
            return None

    def step_costs(self, deployment: Deployment) -> StepCosts:
        """Costs of a deployment's actions, with the host's time and dearer halves."""
        found = self.plans.step_costs(deployment, host_us=self.host_us)
        if deployment.schedule not in DELAYING and deployment.schedule != ZB_V:
            return found
        longer = [self.halves if us > 0 else 1.0 for us in found.weight_us]
        return replace(
            found,
            backward_us=tuple(us * more for us, more in zip(found.backward_us, longer, strict=True)),
            weight_us=tuple(us * more for us, more in zip(found.weight_us, longer, strict=True)),
        )

    def step_us(self, deployment: Deployment) -> float:
        """Simulated time of a step."""
        layout = loss_layout(layout_of(self.graph, deployment))
        return predict(deployment.schedule, layout, self.step_costs(deployment)).step_us

    def best(self, schedule: str, passes: int, below: float) -> tuple[float, Deployment] | None:
        """The fastest of all plans under a schedule that take less than `below` microseconds."""
        counts = microbatch_counts(self.options, rows_per_rank=self.rows, coupled=self.graph.rows_coupled)
        asked = VirtualAsked((schedule,), (passes,), True)
        every = range(1, len(self.slots) + 1)
        shapes = shapes_of(self.plans, asked, counts=counts, zeros=ZEROS, allowed=every)
        best = None
        for least, shape in sorted((least_us(self.plans, shape), shape) for shape in shapes):
            if least >= below * (1 + SLACK):
                break
            for limit, whole in (*((each, True) for each in self.plans.limits), (math.inf, False)):
                cuts = self.plans.cuts(shape, limit)
                if cuts is not None:
                    parts, size = self.plans.fitted(shape, cuts.starts)
                    if size <= self.memory and not (whole and any(any(part.divided.again) for part in parts)):
                        break
            else:
                continue
            found = self.plans.deployment(shape, parts)
            step_us = self.step_us(found)
            if step_us < below:
                best, below = (step_us, found), step_us
        return best


def line(table: Table, model: str, workshop: Workshop, options: argparse.Namespace) -> None:
    """Print the row of a model."""
    begin = time.process_time()
    one = workshop.planned(replace(workshop.options, virtual_stages="1"))
    if one is None:
        table.row(model, "nothing fits", *[None] * (len(table.columns) - 2))
        return
    middle = time.process_time()
    chosen = workshop.planned(workshop.options)
    end = time.process_time()
    step = workshop.step_us(one)
    found = [workshop.best(*kind, options.far * step) for kind in KINDS]
    cells = [_cell((workshop.step_us(chosen), chosen) if chosen is not None else None, step)]
    cells += [_cell(each, step) for each in found]
    took = f"{middle - begin:.1f}, {end - middle:.1f}, {time.process_time() - begin:.0f} s"
    text = f"{one.schedule}, {shape_of(one)}, {fullest_bytes(one) / GIB:.1f} GiB"
    table.row(model, text, _seconds(step), *cells, took)
    for each in found if options.draw else []:
        if each is not None:
            _draw(workshop, each[1])


def _cell(found: tuple[float, Deployment] | None, step: float) -> str:
    if found is None:
        return "none"
    step_us, deployment = found
    mark = "**" if step_us <= WIN * step else ""
    size = fullest_bytes(deployment) / GIB
    return f"{mark}{step_us / step:.3f}{mark} ({size:.1f} GiB, {deployment.schedule}, {shape_of(deployment)})"


def _seconds(us: float) -> str:
    return f"{us / 1e6:.2f} s" if us >= 1e5 else f"{us / 1e3:.2f} ms"


def shape_of(deployment: Deployment) -> str:
    """Such as '4 x 8, m 8, ZeRO 1, recompute': stages or positions, replicas, microbatches per rank."""
    counts = sorted({len(stage.slots) for stage in deployment.stages})
    parts = [
        f"{len(stages_by_slots(deployment))} x {'-'.join(map(str, counts))}",
        f"m {deployment.microbatches}",
        f"ZeRO {deployment.zero}" if deployment.zero else "",
        "recompute" if any(stage.recompute for stage in deployment.stages) else "",
    ]
    return ", ".join(filter(None, parts))


def _draw(workshop: Workshop, deployment: Deployment) -> None:
    """Draw one of the pipelines side by side, its slots in the order of the positions."""
    layout = loss_layout(layout_of(workshop.graph, deployment))
    costs = workshop.step_costs(deployment)
    played = simulate(planned_program(deployment.schedule, layout, costs.split), costs, record=True)
    first = list(dict.fromkeys(slots[0] for slots in layout.stages))
    events = [replace(event, slot=first.index(event.slot)) for event in played.events if event.slot in first]
    print(f"{deployment.schedule}: {shape_of(deployment)}, {_seconds(played.step_us)}, bubble {played.bubble:.3f}")
    print(draw(events, len(first), costs.forward_us[0]))


if __name__ == "__main__":
    main()
