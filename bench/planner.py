"""Benchmarks of the planner: its run time, and its plans compared with those of RaNNC's rule and with even splits.

    python bench/planner.py [times blocks regret moved value subgraphs] [--models 24] [--repeats 5] [--by-e]

times   run time of the stage phase with given profiles: 32 blocks of a transformer, all numbers of stages, replicas,
        microbatches, orders of slots and recomputing; 8, 64 and 512 devices, 8 per node; with and without ranking by
        simulation. Goals are for the first three memory sizes. With the fourth, plans have many stages with unlike
        numbers of replicas, or divide or offload parameters: the search takes longer, and one simulated step of 64
        devices as long as the goal of the ranking
blocks  run time of the phases before it, for graphs of 1,000 and 10,000 operators
regret  simulated time relative to E, for the plans with the least E of 400 random models on up to five devices (those
        of tests/plan/plan_instances.py with seeds 0 to 399), with unlimited memory, not ranked
moved   simulated step of plans whose cuts were moved where the simulator is for it, relative to those that were not:
        400 random models of 12 to 24 blocks in two stages on two devices, with eight microbatches
value   simulated step of our plan, of RaNNC's rule and of stages with equally many operators, for models of tests/zoo
        with analytic costs of cluster cpu, 8 devices on two nodes, with ample memory and with a fraction of what one
        stage would need. Nothing is measured on devices. A ratio above 1.0 means that our plan is faster. With --by-e
        our plan is the one with the least E, not the fastest of those that are simulated.
subgraphs  number of measurements before the first plan of a GPT-2 with 24 layers on 8 ranks, compared with upstream's
        procedure, and for 48 layers after that. They are counted, not made: see bench/_subgraphs.py

RaNNC's rule (Tanaka et al., IPDPS 2021, as implemented): a table over stages, blocks and devices with one best plan in
each cell, by (m + S - 1) (longest forward + longest backward), replicas in powers of two, recomputing if there is more
than one microbatch, GPipe, links of 20 GiB/s and reductions of 10 GiB/s, and the first number of stages that fits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

import msgspec
import numpy as np
from _results import Cell, Spread, Table, found, note

from rannd.config.cluster import load_cluster
from rannd.errors import DoesNotFitError
from rannd.graph.fx.ir import Size, TaskGraph
from rannd.plan.blocks.blocks import Block, make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot, Stage
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search import ranking
from rannd.plan.search.planner import plan
from rannd.plan.simulate.layout import layout_of, loss_layout, piece_rows, step_costs
from rannd.plan.simulate.simulator import predict
from rannd.plan.stage_costs.estimate import StageTables
from rannd.plan.stage_costs.intervals import Intervals
from rannd.plan.stage_costs.shared_tables import SharedTables
from rannd.plan.stage_costs.variant import Variant
from rannd.plan.topology import Machine, place
from rannd.profile.analytic import analytic_costs
from rannd.profile.costs import BlockCost, CostTable, LinkCost

TESTS = Path(__file__).resolve().parent.parent / "tests"
PLENTY, SCARCE = 10**15, 17 * 10**8
MEMORIES = {"ample memory": PLENTY, "tight": 3 * 10**9, "tighter": 24 * 10**8, "scarce": SCARCE}
"""Bytes of a device in `times`."""
WORLD = 8
ROWS = 16
"""Rows per rank."""
PART = 0.7
"""Fraction of the memory that one stage on all devices would need with recomputing."""


def main() -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "plan")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*MEASUREMENTS, []], help="benchmarks (default: all)")
    parser.add_argument("--models", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--by-e", action="store_true", help="value: our plans without the ranking by simulated time")
    options = parser.parse_args()
    for name in options.what or MEASUREMENTS:
        MEASUREMENTS[name](options)


# -- run time -------------------------------------------------------------------------------------------------


def times(repeats: int) -> None:
    from plan_graphs import transformer

    table = Table(
        f"Search for a plan, 32 blocks, 8 devices in a node, {repeats} repeats", "devices", "memory", "ranked",
        ("time", "{:.1f} ms"), "stages", "microbatches", ("gap to the smallest E", "{:.1%}"),
    )  # fmt: skip
    longest: dict[tuple[int, bool], float] = {}
    gaps: dict[int, float] = {}
    graph = scaled(transformer(24))
    options = PlanOptions()
    costs = layered(32)
    for world in (8, 64, 512):
        blocks = make_blocks(Partitioning.of(graph), options, world=world)
        slots = tuple(Slot(*divmod(device, 8)) for device in range(world))
        given = {"world": world, "slots": slots, "batch_rows": 64 * world, "options": options}
        for name, memory in (
            ("ample memory", PLENTY),
            ("tight", int(3e9)),
            ("tighter", int(2.4e9)),
            ("scarce", SCARCE),
        ):
            for ranked in (False, True) if world < 512 else (False,):
                took = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    best = plan(graph, blocks, costs, memory_bytes=memory, ranked=ranked, **given)  # type: ignore[arg-type]
                    took.append((time.perf_counter() - start) * 1e3)
                gap = None  # another schedule is faster
                if best.bound_us:
                    gap = max(0.0, best.e_us / best.bound_us - 1)  # rounding alone makes it negative
                stages = len(best.stages)
                told = "by simulation" if ranked else None
                table.row(world, name, told, Spread.of(took), stages, best.microbatches, gap)
                if memory == SCARCE:
                    continue
                longest[world, ranked] = max(longest.get((world, ranked), 0.0), statistics.median(took))
                gaps[world] = max(gaps.get(world, 0.0), gap or 0.0)
    for world in (8, 64, 512):
        found(f"planner-{world}", longest[world, False], "the longest of the first three memory sizes")
    found("planner-ranked-64", longest[64, True], "the longest of the first three memory sizes")
    found("planner-gap", gaps[64])


def block_times(repeats: int) -> None:
    from plan_graphs import transformer

    table = Table(
        f"From a graph to blocks, cost tables and a plan for 8 devices, {repeats} repeats", "operators", "blocks",
        ("blocks", "{:.2f} s"), ("cost tables", "{:.2f} s"), ("plan", "{:.2f} s"),
    )  # fmt: skip
    slots = tuple(Slot(0, device) for device in range(8))
    for layers, goal in ((59, "graph-1000"), (588, "graph-10000")):
        graph = transformer(layers)
        took = []
        for _ in range(repeats):
            start = time.perf_counter()
            blocks = make_blocks(Partitioning.of(graph), PlanOptions(), world=8)
            middle = time.perf_counter()
            costs = layered(len(blocks))
            Intervals(graph, blocks, costs.blocks)
            end = time.perf_counter()
            plan(graph, blocks, costs, world=8, slots=slots, batch_rows=512, memory_bytes=PLENTY, options=PlanOptions())
            took.append((middle - start, end - middle, time.perf_counter() - end))
        parts = [Spread.of(each) for each in zip(*took, strict=True)]
        table.row(len(graph.ops), len(blocks), *parts)
        found(goal, sum(part.median for part in parts))


def scaled(graph: TaskGraph) -> TaskGraph:
    """Scale the sizes of parameters and values to a model of several GB."""
    params = [msgspec.structs.replace(param, bytes=param.bytes * 1000) for param in graph.params]
    values = [msgspec.structs.replace(value, bytes=Size(0, value.bytes.c1 * 1000)) for value in graph.values]
    return msgspec.structs.replace(graph, params=tuple(params), values=tuple(values))


def layered(count: int) -> CostTable:
    """Costs of layers that differ slightly, with higher costs of the first and last."""
    each = []
    for index in range(count):
        forward = 3000.0 if index in (0, count - 1) else 900.0 + 100.0 * (index % 3)
        each.append(BlockCost(Size(150, forward), Size(200, 2 * forward), Size(0, 3e6)))
    return CostTable(tuple(each), LinkCost(5, 200_000, 10, 100_000), LinkCost(20, 12_000, 30, 12_000))


# -- E compared with simulation ---------------------------------------------------------------------------------


def regret(instances: int = 400) -> None:
    from plan_instances import Instance, played

    kinds: dict[str, list[float]] = {"one stage": [], "equal": [], "unequal": []}
    for seed in range(instances):
        instance = Instance(seed)
        deployment = instance.plan()
        replicas = {len(stage.slots) for stage in deployment.stages}
        difference = played(instance, deployment).step_us / deployment.e_us - 1
        equal = "one stage" if len(deployment.stages) == 1 else "equal"
        kinds[equal if len(replicas) == 1 else "unequal"].append(difference)
    quantiles = {"smallest": 0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "largest": 1}
    table = Table(
        f"Simulated step relative to E, plans of {instances} random models", "replicas", "plans",
        *((name, "{:+.1%}") for name in quantiles),
    )  # fmt: skip
    for name, differences in kinds.items():
        table.row(name, len(differences), *np.quantile(differences, list(quantiles.values())).tolist())


def moved(models: int = 400) -> None:
    from plan_graphs import chain

    options, link = PlanOptions(pipeline_num=4, partition_num=2, schedule="1f1b"), LinkCost(0.0, 1e12, 0.0, 1e12)
    ratios = []
    for seed in range(models):
        random = Random(seed)
        times = [float(random.randint(1, 12)) for _ in range(random.choice([12, 16, 24]))]
        graph = chain(len(times))
        costs = CostTable(tuple(BlockCost(Size(us), Size(2 * us), Size(0, 100)) for us in times), link)
        blocks = make_blocks(Partitioning.of(graph), options, world=2)
        steps = []
        for most in (ranking.MOST_MOVING, 0):
            with mock.patch.object(ranking, "MOST_MOVING", most):
                made = plan(
                    graph, blocks, costs, world=2, slots=(Slot(0, 0), Slot(0, 1)), batch_rows=ROWS,
                    memory_bytes=PLENTY, options=options, ranked=True,
                )  # fmt: skip
            steps.append(made.step_us)
        ratios.append(steps[0] / steps[1])
    quantiles = {"smallest": 0, "10 %": 0.1, "median": 0.5, "largest": 1}
    table = Table(
        f"Plans of {models} random models in two stages, simulated: moved cuts / those with the least E",
        "more than 3 % faster", *((name, "{:.3f}") for name in quantiles),
    )  # fmt: skip
    faster = sum(ratio < 0.97 for ratio in ratios) / models
    table.row(f"{faster:.0%}", *np.quantile(ratios, list(quantiles.values())).tolist())


# -- value of plans -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model with the devices to plan for."""

    graph: TaskGraph
    blocks: tuple[Block, ...]
    costs: CostTable
    memory: int
    slots: tuple[Slot, ...]
    rows: int

    def tables(self, variant: Variant, *, recompute: bool) -> StageTables:
        intervals = Intervals(self.graph, self.blocks, self.costs.blocks)
        machine = Machine(self.slots, self.costs.link, self.costs.between)
        count, world = len(self.blocks), len(self.slots)
        return StageTables(
            SharedTables(intervals, machine),
            PlanOptions(checkpointing=recompute),
            variant,
            rows=piece_rows(self.rows, world, variant.microbatches),
            limit=float(self.memory),
            allowed=np.ones((count + 1, count + 1), dtype=bool),
            replicas=np.arange(1, world + 1),
        )

    def deployment(self, table: StageTables, starts: list[int], replicas: list[int]) -> Deployment | None:
        """Deployment with given stages and replicas; None if it does not fit."""
        left, stages = len(self.slots), []
        ends = [*starts[1:], len(self.blocks)]
        for start, end, home in zip(starts, ends, place(replicas, table.variant.placement), strict=True):
            left -= len(home)
            if not np.isfinite(table.stages(end, left).fill[start, len(home) - 1]):
                return None
            names = [self.graph.ops[op].name for block in self.blocks[start:end] for op in block.ops]
            again = table.recomputes(start, end, len(home), used=left)
            estimate = table.estimate(start, end, len(home), used=left)
            stages.append(Stage(f"MERGE_{start}_{end - 1}", tuple(names), home, again, estimate))
        return Deployment(
            format=2,
            graph_hash="",
            slots=self.slots,
            stages=tuple(stages),
            microbatches=table.variant.microbatches,
            schedule=table.variant.schedule,
            batch_rows=self.rows,
            step_us=0.0,
        )

    def step_us(self, deployment: Deployment) -> float:
        """Simulated time of a step in microseconds."""
        costs = step_costs(self.graph, deployment, self.costs.link, self.costs.between)
        return predict(deployment.schedule, loss_layout(layout_of(self.graph, deployment)), costs).step_us

    @property
    def microbatches(self) -> list[int]:
        rows = self.rows // len(self.slots)
        return [1] if self.graph.rows_coupled else [m for m in (1, 2, 4, 8, 16, 32) if m <= rows]

    # -- compared plans ---------------------------------------------------------------------------------------

    def ours(self, *, ranked: bool) -> Deployment | None:
        try:
            return plan(
                self.graph,
                self.blocks,
                self.costs,
                world=len(self.slots),
                slots=self.slots,
                batch_rows=self.rows,
                memory_bytes=self.memory,
                options=PlanOptions(schedule="1f1b"),  # as the plans that it is compared with
                ranked=ranked,
            )
        except DoesNotFitError:
            return None

    def even(self) -> Iterator[Deployment]:
        """Yield 1F1B plans with equal operators and replicas per stage, for all numbers of stages and microbatches."""
        world, count = len(self.slots), len(self.blocks)
        sizes = np.cumsum([len(block.ops) for block in self.blocks])
        for stages in [each for each in range(1, min(world, count) + 1) if world % each == 0]:
            cuts = [int(np.abs(sizes - sizes[-1] * part / stages).argmin()) + 1 for part in range(1, stages)]
            if sorted(set(cuts)) != cuts or (cuts and cuts[-1] >= count):
                continue
            for microbatches in self.microbatches:
                table = self.tables(Variant("1f1b", microbatches, "stages"), recompute=False)
                found = self.deployment(table, [0, *cuts], [world // stages] * stages)
                if found is not None:
                    yield found

    def rannc(self) -> Deployment | None:
        """Plan by RaNNC's rule; None if none fits."""
        world, count = len(self.slots), len(self.blocks)
        for stages in range(1, min(world, count) + 1):
            found = []
            for microbatches in self.microbatches:
                table = self.tables(Variant("gpipe", microbatches, "stages"), recompute=microbatches > 1)
                chosen = rannc_table(self, table, stages)
                if chosen is not None:
                    found.append((chosen[0], table, chosen[1], chosen[2]))
            for _, table, starts, replicas in sorted(found, key=lambda each: each[0]):
                deployment = self.deployment(table, starts, replicas)
                if deployment is not None:
                    return deployment
        return None


def rannc_table(case: Case, table: StageTables, stages: int) -> tuple[float, list[int], list[int]] | None:
    """(cost, first block of each stage, replicas) of the best plan with `stages` stages, by RaNNC's table."""
    world, count, microbatches = len(case.slots), len(case.blocks), table.variant.microbatches
    link = LinkCost(0.0, 20 * 1024**3 / 1e6, 0.0, 10 * 1024**3 / 1e6)
    powers = [1 << power for power in range(world.bit_length()) if 1 << power <= world]
    again = table.options.checkpointing
    states: dict[tuple[int, int], tuple[float, float, float, list[int], list[int]]] = {(0, 0): (0.0, 0.0, 0.0, [], [])}
    for stage in range(stages):
        better: dict[tuple[int, int], tuple[float, float, float, list[int], list[int]]] = {}
        for (start, used), (forward, backward, reduce, starts, replicas) in states.items():
            last = stage + 1 == stages
            for end in [count] if last else range(start + 1, count):
                for number in [each for each in powers if used + each <= world and (not last or used + each == world)]:
                    terms = table.stages(end, world - used - number)
                    if not np.isfinite(terms.fill[start, number - 1]):
                        continue
                    if terms.recompute[start, number - 1] != again:  # fits only with a setting that RaNNC does not use
                        continue
                    share = world / number
                    f = share * (table.forward_us[start, end] + link.p2p_us(table.microbatch.received[start, end]))
                    b = share * (table.backward_us[start, end] + link.p2p_us(table.microbatch.sent_grad[start, end]))
                    b += share * table.forward_us[start, end] if again else 0.0
                    a = link.allreduce_us(float(table.intervals.trainable.whole[start, end]), number)
                    state = (max(forward, f), max(backward, b), max(reduce, a), [*starts, start], [*replicas, number])
                    place_of = (end, used + number)
                    if place_of not in better or sum(state[:2]) < sum(better[place_of][:2]):
                        better[place_of] = state
        states = better
    found = states.get((count, world))
    if found is None:
        return None
    return (microbatches + stages - 1) * (found[0] + found[1]) + found[2], found[3], found[4]


def value(models: int, *, ranked: bool) -> None:
    cluster = load_cluster("cpu")
    slots = tuple(Slot(*divmod(device, WORLD // 2)) for device in range(WORLD))
    ratios: dict[str, list[float]] = {"RaNNC's rule": [], "even": []}
    regrets = []
    done = 0
    table = Table(
        f"Simulated step of other plans / of rannd's, {WORLD} devices", "model", "memory", "stages", "microbatches",
        *(part for other in ratios for part in (other, f"{other}: stages x microbatches")),
    )  # fmt: skip
    for name, graph in zoo_graphs():
        if done == models:
            break
        done += 1
        blocks = make_blocks(Partitioning.of(graph), PlanOptions(), world=WORLD)
        ops = [block.ops for block in blocks]
        costs = analytic_costs(graph, ops, cluster, fewest=1, most=ROWS, nodes=2)
        for part in (1.0, PART):
            case = Case(graph, blocks, costs, PLENTY, slots, ROWS * WORLD)
            if part < 1:
                whole = case.tables(Variant("1f1b", max(case.microbatches), "stages"), recompute=True)
                most = whole.bytes_needed(0, len(blocks), WORLD, used=0)
                case = Case(graph, blocks, costs, int(most * part), slots, ROWS * WORLD)
            ours = case.ours(ranked=ranked)
            if ours is None:
                table.row(name, f"{part:.0%}", "nothing fits", None, None, None, None, None)
                continue
            took = case.step_us(ours)
            regrets.append(took / ours.e_us)
            cells: list[Cell] = []
            others = {"RaNNC's rule": case.rannc(), "even": min(case.even(), key=case.step_us, default=None)}
            for other, deployment in others.items():
                if deployment is None:
                    cells += ["nothing fits", None]
                    continue
                ratio = case.step_us(deployment) / took
                ratios[other].append(ratio)
                cells += [ratio, f"{len(deployment.stages)} x {deployment.microbatches}"]
            table.row(name, f"{part:.0%}", len(ours.stages), ours.microbatches, *cells)
    means = Table("All of them", "plan", "plans that fit", "geometric mean", "smallest", "largest", "below 0.999")
    for other, each in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, each)))
        worse = sum(ratio < 0.999 for ratio in each)
        means.row(other, len(each), mean, min(each), max(each), worse)
        found("value-even" if other == "even" else "value-rannc", mean, f"{len(each)} plans")
    found("value-worst", min(map(min, ratios.values())))
    spread = Spread.of(regrets)
    note(f"simulated / E of rannd's plans: median {spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})")


def zoo_graphs() -> Iterator[tuple[str, TaskGraph]]:
    """Yield task graphs of the zoo's models that have a single loss and enough operators."""
    import torch
    from zoo import ZOO

    from rannd.graph.call.signature import Mode, classify, flatten_call
    from rannd.graph.model import build

    for entry in ZOO:
        torch.manual_seed(0)
        with entry.precision():
            model = entry.build().train()
            call = flatten_call((), entry.batch(4))
            signature = classify(call, Mode.current(True), [call.shapes()])
            graph = build(model, signature, list(call.tensors), torch.device("cpu"))
        if graph.sole_loss is not None and len(graph.task.ops) > WORLD:
            yield entry.name, graph.task


# -- measurements before planning ------------------------------------------------------------------------------


def subgraphs() -> None:
    import _subgraphs  # imports torch, which the planner does not need

    _subgraphs.subgraphs()


MEASUREMENTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "times": lambda options: times(options.repeats),
    "blocks": lambda options: block_times(options.repeats),
    "regret": lambda options: regret(),
    "moved": lambda options: moved(),
    "value": lambda options: value(options.models, ranked=not options.by_e),
    "subgraphs": lambda options: subgraphs(),
}

if __name__ == "__main__":
    main()
