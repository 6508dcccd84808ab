"""Compares analytic costs (rannd/profile/analytic.py) with measured ones, for the blocks of a GPT-2 on this machine.

    python bench/analytic.py [--layers 6] [--width 256] [--rows 8] [--sequence 128] [--rounds 8]

Runs in one thread, with the malloc settings that rannc-run uses for CPU ranks. The cluster description of this machine
uses measured rates: of a large matrix product, a sum of two large vectors, and an addition of two numbers. Its peaks
are these rates, so its efficiencies are 1; nothing is fitted to the model. Blocks are measured as in a job, alternating
with the rates; the best round of each counts. A ratio above 1 means that the analytic cost is too high. At the end,
plans made with analytic costs are simulated with measured costs, which shows how much slower their steps are.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from _results import Cell, Table, note
from msgspec.structs import replace

from rannd.config.cluster import Cluster, Efficiency, Link, Links, Tflops, load_cluster
from rannd.graph.call.signature import Mode, classify, flatten_call
from rannd.graph.fx.ir import TaskGraph
from rannd.graph.model import ModelGraph, build
from rannd.graph.partition.block_hash import block_hashes
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search.planner import plan
from rannd.plan.simulate.layout import layout_of, loss_layout, piece_rows, step_costs
from rannd.plan.simulate.simulator import predict
from rannd.profile.analytic import analytic_costs, link_cost
from rannd.profile.block_costs import block_part, measure_alone
from rannd.profile.costs import BlockCost, CostTable, LinkCost
from rannd.profile.measure import ProfileInputs
from rannd.runner.resources.rank_environment import MALLOC_SETTINGS

CPU = torch.device("cpu")
VOCABULARY = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    if any(name not in os.environ for name in MALLOC_SETTINGS):  # malloc reads them only at process start
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC_SETTINGS})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = gpt2(options.layers, options.width, options.sequence)
    ids = torch.randint(VOCABULARY, (options.rows, options.sequence))
    graph, sample = graph_of(model, ids)
    blocks = [block.ops for block in make_blocks(Partitioning.of(graph.task), PlanOptions(), world=2)]
    few = max(options.rows // 4, 1)
    here, measured = machine_and_blocks(graph, blocks, sample, (few, options.rows), options.rounds)
    note(
        f"this machine: {here.tflops.float32 * 1e3:.0f} GFLOP/s, {here.memory_gb_per_s:.1f} GB/s, "
        f"{here.op_latency_us:.1f} us per operator"
    )
    analytic = analytic_costs(graph.task, blocks, here, fewest=few, most=options.rows, nodes=1).blocks
    show(graph, blocks, analytic, measured, options.rows)
    table = Table(
        "Simulated steps of plans with analytic costs and with measured ones, links of cluster cpu", "devices", "plan",
        ("analytic", "{:.2f} ms"), ("measured", "{:.2f} ms"), "ratio",
    )  # fmt: skip
    link = link_cost(load_cluster("cpu"), load_cluster("cpu").link.inside)
    for world in (2, 4, 8):
        for stages in (0, world):
            formula, truth = (
                simulated(graph.task, made, tuple(measured), link, world, options.rows, stages)
                for made in (analytic, tuple(measured))
            )
            asked = f"{stages} stages requested" if stages else "any stages"
            table.row(world, asked, formula / 1e3, truth / 1e3, formula / truth)


def simulated(
    task: TaskGraph,
    planned: tuple[BlockCost, ...],
    true: tuple[BlockCost, ...],
    link: LinkCost,
    world: int,
    rows: int,
    stages: int,
) -> float:
    """Microseconds of a step, simulated with costs `true`, of a plan made with costs `planned`; `rows` per rank."""
    options = PlanOptions(partition_num=stages)
    blocks = make_blocks(Partitioning.of(task), PlanOptions(), world=2)
    deployment = plan(
        task,
        blocks,
        CostTable(planned, link),
        world=world,
        slots=tuple(Slot(0, device) for device in range(world)),
        batch_rows=rows * world,
        memory_bytes=10**15,
        options=options,
    )
    piece = piece_rows(rows * world, world, deployment.microbatches)
    told = []
    for stage in deployment.stages:
        names = set(stage.ops)
        costs = [cost for block, cost in zip(blocks, true, strict=True) if task.ops[block.ops[0]].name in names]
        pieces = -(-world * deployment.microbatches // len(stage.slots))
        forward, backward, weight = (
            pieces * sum(getattr(cost, name).at(piece) for cost in costs)
            for name in ("forward_us", "backward_us", "weight_us")
        )
        backward += forward if stage.recompute else 0.0
        estimate = replace(stage.estimate, forward_us=forward, backward_us=backward, weight_us=weight)
        told.append(replace(stage, estimate=estimate))
    deployment = replace(deployment, stages=tuple(told))
    layout = loss_layout(layout_of(task, deployment))
    return predict(deployment.schedule, layout, step_costs(task, deployment, link)).step_us


Rates = tuple[float, float, float]
"""Minimum microseconds of the matrix product, the sum of vectors and the small addition."""
SIDE, LENGTH = 1536, 1 << 25


def rates() -> Rates:
    """Measure the rates of one thread of this machine."""
    one, two = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    long, other = torch.rand(LENGTH), torch.rand(LENGTH)
    target = torch.empty_like(long)
    small = torch.rand(2)
    return (
        best(lambda: one @ two),
        best(lambda: torch.add(long, other, out=target)),
        best(lambda: [small + small for _ in range(1000)]) / 1000,
    )


def machine(found: Rates) -> Cluster:
    """Cluster description of one thread of this machine as a single device."""
    product_us, sum_us, latency_us = found
    tflops = 2 * SIDE**3 / product_us / 1e6
    nowhere = Link(gb_per_s=1.0, latency_us=0.0)
    return Cluster(
        device="this CPU",
        devices_per_node=1,
        memory_gib=1.0,
        memory_gb_per_s=3 * 4 * LENGTH / sum_us / 1e3,
        op_latency_us=latency_us,
        tflops=Tflops(float64=tflops / 2, float32=tflops, float16=tflops, bfloat16=tflops),
        link=Links(inside=nowhere),
        efficiency=Efficiency(flops=1.0, memory=1.0, links=1.0),
        name="measured here",
    )


def best(action: Callable[[], object]) -> float:
    """Least time of some runs, in microseconds."""
    took = []
    for _ in range(7):
        start = time.perf_counter()
        action()
        took.append((time.perf_counter() - start) * 1e6)
    return min(took)


def gpt2(layers: int, width: int, sequence: int) -> torch.nn.Module:
    """GPT-2 as the zoo of the tests has it, larger, and with its loss."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=sequence, n_embd=width, n_layer=layers, n_head=4, use_cache=False,
        bos_token_id=0, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def graph_of(model: torch.nn.Module, ids: torch.Tensor) -> tuple[ModelGraph, ProfileInputs]:
    call = flatten_call((), {"input_ids": ids, "labels": ids})
    signature = classify(call, Mode.current(True), [call.shapes()])
    graph = build(model, signature, list(call.tensors), CPU)
    arguments = {
        node: (leaf, spec.batch)
        for node, leaf, spec in zip(graph.traced.placeholders, call.tensors, signature.tensors, strict=False)
    }
    state = {**graph.traced.constants, **dict(model.named_buffers()), **dict(model.named_parameters())}
    return graph, ProfileInputs(arguments, frozenset(graph.placement.requires_grad), state, CPU)


def machine_and_blocks(
    graph: ModelGraph, blocks: list[tuple[int, ...]], sample: ProfileInputs, rows: tuple[int, int], rounds: int
) -> tuple[Cluster, list[BlockCost]]:
    """Measure rates and blocks alternately, keeping the best round of each; equal blocks are measured once."""
    hashes = block_hashes(graph.task, blocks)
    found: dict[str, BlockCost] = {}
    least: Rates = (float("inf"),) * 3
    for _ in range(rounds):
        product_us, sum_us, latency_us = rates()
        least = (min(least[0], product_us), min(least[1], sum_us), min(least[2], latency_us))
        for number, key in enumerate(hashes):
            if hashes.index(key) == number:
                again = measure_alone(block_part(graph, blocks[number]), sample, rows).cost(max(rows))
                if key not in found or _whole(again, rows[1]) < _whole(found[key], rows[1]):
                    found[key] = again
    return machine(least), [found[key] for key in hashes]


def _whole(cost: BlockCost, rows: int) -> float:
    return cost.forward_us.at(rows) + cost.backward_us.at(rows)


def show(
    graph: ModelGraph,
    blocks: list[tuple[int, ...]],
    analytic: tuple[BlockCost, ...],
    measured: list[BlockCost],
    rows: int,
) -> None:
    hashes = block_hashes(graph.task, blocks)
    names = {"forward": ("forward_us", 1e3), "backward": ("backward_us", 1e3), "saved": ("activation_bytes", 2**20)}
    units = {"forward": "{:.3f} ms", "backward": "{:.3f} ms", "saved": "{:.3f} MiB"}
    columns: list[str | tuple[str, str]] = []
    for name, unit in units.items():
        columns += [(f"{name}, analytic", unit), (f"{name}, measured", unit), (f"{name}, ratio", "{:.2f}")]
    table = Table(
        f"Analytic and measured costs of {len(blocks)} blocks, {rows} rows", "last operator", "blocks", *columns
    )
    for number, key in enumerate(hashes):
        if hashes.index(key) != number:
            continue
        cells: list[Cell] = []
        for name, unit in names.values():
            ours, real = (getattr(each[number], name).at(rows) / unit for each in (analytic, measured))
            cells += [ours, real, ours / real if real else None]
        table.row(graph.task.ops[blocks[number][-1]].name, hashes.count(key), *cells)
    sums = Table("Analytic / measured", "what", "all blocks together", "median of the blocks", "smallest", "largest")
    for name, _ in names.values():
        pairs = [
            (getattr(a, name).at(rows), getattr(m, name).at(rows)) for a, m in zip(analytic, measured, strict=True)
        ]
        total = sum(ours for ours, _ in pairs) / sum(real for _, real in pairs)
        ratios = sorted(ours / real for ours, real in pairs if real)
        sums.row(name, total, statistics.median(ratios), ratios[0], ratios[-1])
    shares = [_whole(a, rows) / _whole(m, rows) for a, m in zip(analytic, measured, strict=True) if _whole(a, rows)]
    middle = statistics.median(shares)
    off = [abs(share / middle - 1) for share in shares]
    note(
        f"blocks relative to each other (without those of views only): deviation from the median ratio "
        f"{statistics.median(off):.0%} (median), {max(off):.0%} (maximum)"
    )


if __name__ == "__main__":
    main()
