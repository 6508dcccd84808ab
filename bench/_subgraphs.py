"""Counts the measurements that profiling a GPT needs before its first plan, in rannd and in upstream RaNNC.

Nothing is measured here. A measurement is of one part of the model with one number of rows, and consists of several
runs of the part: its forward, in most runs followed by its backward.

ours         different grains (by structural hash) times numbers of rows, as requested by
             rannd/runtime/costs/profiler.py; all ranks of a node make them at the same moment
stage phase  upstream's: different merged graphs of consecutive blocks times rows times with or without recomputing,
             in the loops of its search (see `upstream`), all on one rank. Assumes our blocks; whether a stage fits into
             a device is computed by formula
operators    upstream's block phase measures each operator separately before it merges the first two. It also measures
             the merges that it tries, which are not counted here

It is not taken into account that a merged graph takes much longer than a grain, and an operator less.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from _results import Table, found, note

from rannd.config import Config
from rannd.config.cluster import Cluster, load_cluster
from rannd.graph.fx.ir import TaskGraph
from rannd.graph.partition.block_hash import block_hashes
from rannd.plan.blocks.atoms import make_atoms
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.grains import make_grains
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.plan_options import PlanOptions
from rannd.plan.stage_costs.intervals import Intervals, at
from rannd.profile.analytic import analytic_costs
from rannd.profile.block_costs import TURNS
from rannd.profile.measure import FEWEST_RUNS
from rannd.profile.points import Measured, Point, lacking

DEVICES = 8
ROWS = 64
"""Rows per rank."""
SEQUENCE = 1024
LAYERS, DEEPER = 24, 48
WIDTHS = (1024, 2048, 4096)
CLUSTER = "v100x8"

FORWARDS = 2 + TURNS * (FEWEST_RUNS + -(-FEWEST_RUNS // 2))
"""Forward runs of a part in one of our measurements, if it takes 5 ms or more and does not vary: one to record what
autograd saves, one to see how long it takes, and in each turn the timed runs, and half as many for gradients of inputs
only. All but the first also run backward."""
THEIR_RUNS = 3
"""Runs of one measurement of upstream. If the stage recomputes, each runs forward three times: to find out whether
there is a backward, for the timing, and in backward."""

Asked = tuple[int, int, int, bool]
"""(first block, last block + 1, rows, whether the stage recomputes)."""


def subgraphs() -> None:
    cluster = load_cluster(CLUSTER)
    note(f"{LAYERS} layers, {DEVICES} ranks, {ROWS} rows per rank of {SEQUENCE} tokens; memory of {cluster.name}")
    times = "{:.1f}"
    table = Table(
        "Measurements before the first plan, RaNNC's beside rannd's (counted)", "width", "stages of RaNNC's plan",
        "rannd's measurements", "RaNNC's: operators", "merged graphs x sizes", "RaNNC's runs",
        ("measurements / rannd's", times), ("runs / rannd's", times), ("runs of the stage phase / rannd's", times),
    )  # fmt: skip
    first: TaskGraph | None = None
    for width in WIDTHS:
        graph = gpt(LAYERS, width)
        first = first or graph
        ours = missing(graph, {})
        stages, asked = upstream(graph, cluster)
        runs = sum(THEIR_RUNS * (3 if again else 1) for *_, again in asked)
        graphs, sizes = len({each[:2] for each in asked}), len({each[2:] for each in asked})
        operators = len(graph.ops)
        count = sum(map(len, ours.values()))
        both = runs + operators * THEIR_RUNS
        table.row(
            width, stages, count, operators, f"{graphs} x {sizes}", both, (len(asked) + operators) / count,
            both / count / FORWARDS, runs / count / FORWARDS,
        )  # fmt: skip
    found("profiling-runs", both / count / FORWARDS)
    assert first is not None
    deeper = gpt(DEEPER, WIDTHS[0])
    own = Table(
        f"rannd's measurements, width {WIDTHS[0]}", "parts", f"{LAYERS} layers", f"{DEEPER} layers",
        f"{DEEPER} layers after {LAYERS}",
    )  # fmt: skip
    for apart, name in ((False, "grains"), (True, "profile_by_acc")):
        before = missing(first, {}, apart=apart)
        later = missing(deeper, after(before), apart=apart)
        cases = (before, missing(deeper, {}, apart=apart), later)
        own.row(name, *(sum(map(len, each.values())) for each in cases))


def gpt(layers: int, width: int) -> TaskGraph:
    """Task graph of a GPT-2 in training with heads of 64 channels that returns its loss; built on the meta device."""
    import torch
    import transformers

    from rannd.graph.call.signature import Mode, classify, flatten_call
    from rannd.graph.model import build

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.GPT2Config(
                n_layer=layers, n_embd=width, n_head=width // 64, n_positions=SEQUENCE, use_cache=False
            )
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
            return loss

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with torch.device("meta"):
        model = Loss().train()
    call = flatten_call((torch.ones(ROWS, SEQUENCE, dtype=torch.long),), {})
    signature = classify(call, Mode.current(True), [call.shapes()])
    return build(model, signature, list(call.tensors), torch.device("cpu")).task


# -- ours -----------------------------------------------------------------------------------------------------


def missing(graph: TaskGraph, known: Mapping[str, Measured], *, apart: bool = False) -> dict[str, tuple[int, ...]]:
    """Row counts that have to be measured, by hash of a grain (with `apart`, as in profile_by_acc, of an atom)."""
    atoms = make_atoms(graph)
    parts = atoms if apart else make_grains(graph, atoms)
    hashes = dict.fromkeys(block_hashes(graph, parts))
    found = {each: lacking(known.get(each), ROWS, whole=graph.rows_coupled) for each in hashes}
    return {each: rows for each, rows in found.items() if rows}


def after(measured: Mapping[str, tuple[int, ...]]) -> dict[str, Measured]:
    """Known measurements after these have been made."""
    return {each: Measured(tuple(Point(count, 0, 0, 0, 0) for count in rows)) for each, rows in measured.items()}


# -- upstream -------------------------------------------------------------------------------------------------


class Memory:
    """Memory of a stage as upstream computes it, except that activations are computed by formula, not measured."""

    def __init__(self, graph: TaskGraph, cluster: Cluster) -> None:
        blocks = make_blocks(Partitioning.of(graph), PlanOptions(), world=DEVICES)
        costs = analytic_costs(graph, [each.ops for each in blocks], cluster, fewest=1, most=ROWS * DEVICES, nodes=1)
        self.blocks = len(blocks)
        self._limit = cluster.memory_bytes * (1 - Config().mem_margin)
        self._intervals = Intervals(graph, blocks, costs.blocks)

    def fits(self, start: int, end: int, rows: int) -> bool:
        """Whether a stage fits: parameters, gradients, optimizer state, a microbatch's activations and its messages."""
        each = self._intervals
        state = each.params + (1 + PlanOptions().opt_param_factor) * each.trainable.whole
        moving = sum(at(table[:, start, end], rows) for table in (each.activation, each.received, each.sent))
        return bool(state[start, end] + moving < self._limit)


def upstream(graph: TaskGraph, cluster: Cluster) -> tuple[int, set[Asked]]:
    """Simulate upstream's stage phase on one node: returns the stages of its first plan, and all measurements up to it.

    For increasing numbers of stages, and for 1, 2, 4 .. microbatches (with recomputing if more than one), a table over
    stages, their last block and the devices used so far is filled. A cell requests measurements of all stages that can
    end there after a cell with a plan, with 1, 2, 4 .. replicas. The search ends at the number of stages of the first
    plan. As in upstream, cells are skipped from where nothing fits any more. A measurement that runs out of memory
    counts once; it is not tried with more rows.
    """
    memory = Memory(graph, cluster)
    asked: set[Asked] = set()
    too_many: dict[tuple[int, int, bool], int] = {}
    for stages in range(1, min(DEVICES, memory.blocks) + 1):
        counts = [1 << power for power in range(Config().max_pipeline.bit_length())]
        found = [_plans(memory, stages, count, asked, too_many) for count in counts]
        if any(found):
            break
    return stages, asked


def _plans(
    memory: Memory, stages: int, microbatches: int, asked: set[Asked], too_many: dict[tuple[int, int, bool], int]
) -> bool:
    """Fill one table; returns whether there is a plan."""
    again = microbatches > 1
    cells = {(0, 0)}
    """Reached cells: (blocks, devices) used by the stages so far."""
    for stage in range(stages):
        last = stage + 1 == stages
        reached: set[tuple[int, int]] = set()
        fewest = stage + 1
        for end in [memory.blocks] if last else range(stage + 1, memory.blocks - stages + stage + 2):
            fits_here = False
            for used in range(DEVICES, fewest - 1, -1):
                fits = skipped = False
                for start in range(stage, end) if stage else [0]:
                    for before in range(stage, used) if stage else [0]:
                        replicas = used - before
                        if replicas & (replicas - 1):
                            skipped = True
                            continue
                        if (start, before) not in cells:
                            continue
                        rows = math.ceil(ROWS * DEVICES / (replicas * microbatches))
                        if rows < too_many.get((start, end, again), rows + 1):
                            asked.add((start, end, rows, again))
                        if not memory.fits(start, end, rows):
                            too_many[start, end, again] = min(rows, too_many.get((start, end, again), rows))
                            break  # with more devices used before, this stage would have fewer replicas
                        fits = True
                        reached.add((end, used))
                fits_here |= fits
                if not (fits or skipped):
                    fewest = used + 1
                    break
            if not fits_here:
                break
        cells = reached
    return (memory.blocks, DEVICES) in cells
