"""Plans for the experiments of RaNNC's paper: which sizes of BERT and of a widened ResNet152 fit on 32 V100, and how.

    python bench/paper.py [bert resnet] [--hidden 1024 1536 2048] [--layers 24 96 256] [--widths 1 2 4 8]
                          [--half] [--attention sdpa] [--cluster v100x8] [--devices 32] [--batch N] [--sequence 512]
                          [--blocks 32] [--steps]

Tanaka et al.: Automatic Graph Partitioning for Very Large-scale Deep Learning (IPDPS 2021): 4 nodes with 8 V100 of
32 GB each; BERT with batches of 256 rows of 512 tokens, ResNet152 with batches of 512 images. The models are built on
the meta device; costs are computed from the cluster's description (docs/clusters.md). Nothing is run; only the CPU time
of tracing and planning is measured. The plans are those that `rannc-run --plan-only --cluster v100x8 -np 32` prints for
scripts with these models and the default configuration; rannc_conf.toml is not read.

--half   autocast to float16 with a GradScaler; parameters, gradients and optimizer state stay float32
--blocks value of max_partition_num
--steps  print CPU time of each part (task graph, blocks and costs, search with ranking) and peak memory to stderr

Columns: billions of parameters; stages and replicas; microbatches per rank and rows of each; stages that recompute;
schedule, and whether neighbouring slots are 'stages' or 'replicas' (docs/planning.md); predicted time of a step, and
the resulting samples per second; GiB on the fullest device; memory of pure data parallelism, and its step relative to
the plan's; the fastest plan with other replicas; CPU time of tracing, and of planning.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from _results import Table, note
from msgspec.structs import replace
from torch import Tensor, nn

from rannd.config import Config
from rannd.config.cluster import Cluster, load_cluster
from rannd.errors import DoesNotFitError
from rannd.graph.call.signature import Mode, classify, flatten_call
from rannd.graph.fx.ir import TaskGraph
from rannd.graph.model import build
from rannd.graph.tracing.frontend import trace
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.partitioning import Partitioning
from rannd.plan.deployment import Deployment, Slot
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search.planner import plan
from rannd.plan.slot_memory import fullest_bytes
from rannd.profile.analytic import analytic_costs
from rannd.runtime.parameters.tensor_swap import others, unwritten

GIB = 2**30
VOCABULARY = 30522
HEADER = (
    "model", "10⁹ parameters", "plan", "microbatches", "recompute", "schedule", "step", "samples/s", "GiB",
    "data parallel", "next best", "traced, planned",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["bert", "resnet", []], help="models (default: both)")
    parser.add_argument(
        "--hidden", type=int, nargs="+", default=[1024, 1536, 2048], help="widths of BERT, with 64 channels per head"
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 96, 256])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8], help="factors of ResNet152's channels")
    parser.add_argument("--half", action="store_true", help="autocast to float16")
    parser.add_argument(
        "--attention", choices=["sdpa", "eager"], default="sdpa", help="fused attention, or eager as in 2021"
    )
    parser.add_argument("--cluster", default="v100x8")
    parser.add_argument("--devices", type=int, default=32)
    parser.add_argument("--batch", type=int, help="rows of the global batch (default: BERT 256, ResNet 512)")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=Config().max_partition_num, help="max_partition_num")
    parser.add_argument("--steps", action="store_true", help="print the time of each part of planning")
    options = parser.parse_args()
    cluster = load_cluster(options.cluster)
    limit = int(cluster.memory_bytes * (1 - Config().mem_margin))
    note(
        f"{options.devices} devices of {cluster.name} ({cluster.description}), {limit / GIB:.1f} GiB of "
        f"{cluster.memory_gib:g} for a plan; {'float16 autocast' if options.half else 'float32'}; torch "
        f"{torch.__version__}, transformers {transformers.__version__}; nothing ran on such devices"
    )
    table = Table(f"Plans for the models of RaNNC's paper, {options.devices} devices (simulated)", *HEADER)
    target = Target(cluster, options.devices, limit, options.half, options.blocks, options.steps)
    for name in options.what or ("bert", "resnet"):
        rows = -(-(options.batch or {"bert": 256, "resnet": 512}[name]) // options.devices)
        for model in berts(options, rows) if name == "bert" else resnets(options.widths, rows):
            table.row(*line(model, target))


# -- models ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and the mini-batch of one rank."""

    name: str
    build: Callable[[], nn.Module]
    batch: dict[str, Tensor]


class Loss(nn.Module):
    """A Hugging Face model that returns only its loss, as a training script would wrap it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


def berts(options: argparse.Namespace, rows: int) -> Iterator[Case]:
    """Yield BERT models with both pre-training losses, for sequences without padding; heads have 64 channels."""
    ids = torch.ones(rows, options.sequence, dtype=torch.long)
    batch = {
        "input_ids": ids, "token_type_ids": ids, "labels": ids,
        "next_sentence_label": torch.zeros(rows, dtype=torch.long),
    }  # fmt: skip
    for hidden in options.hidden:
        for layers in options.layers:
            config = transformers.BertConfig(
                vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
                intermediate_size=4 * hidden, max_position_embeddings=options.sequence,
                attn_implementation=options.attention,
            )  # fmt: skip
            yield Case(
                f"BERT {hidden} x {layers}", lambda config=config: transformers.BertForPreTraining(config), batch
            )


def resnets(widths: list[int], rows: int) -> Iterator[Case]:
    """Yield ResNet152 with all channels multiplied by a factor, for 1,000 classes of 224 x 224 images."""
    batch = {"pixel_values": torch.zeros(rows, 3, 224, 224), "labels": torch.zeros(rows, dtype=torch.long)}
    for width in widths:
        config = transformers.ResNetConfig(
            embedding_size=64 * width, hidden_sizes=[each * width for each in (256, 512, 1024, 2048)],
            depths=[3, 8, 36, 3], layer_type="bottleneck", num_labels=1000, problem_type="single_label_classification",
        )  # fmt: skip
        yield Case(f"ResNet152x{width}", lambda config=config: transformers.ResNetForImageClassification(config), batch)


# -- plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """Devices to plan for; `memory`: bytes of each device that a plan may use."""

    cluster: Cluster
    devices: int
    memory: int
    half: bool
    blocks: int
    steps: bool


@dataclass(frozen=True)
class Traced:
    """A model's graph, its number of parameters, and CPU time of tracing and of making the graph."""

    task: TaskGraph
    parameters: int
    trace_s: float
    graph_s: float


def traced_graph(case: Case, *, half: bool) -> Traced:
    """Trace a model on the meta device; `half`: under autocast to float16."""
    begin = time.process_time()
    with torch.device("meta"):
        model = Loss(case.build()).train()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    with torch.autocast("cpu", torch.float16) if half else contextlib.nullcontext():
        call = flatten_call((), case.batch)
        signature = classify(call, Mode.current(True), [call.shapes()])
        with others([*model.parameters(), *model.buffers()], unwritten):  # as a job traces a model on the meta device
            traced, signature = trace(model, signature, list(call.tensors), torch.device("cpu"))
        middle = time.process_time()
        graph = build(model, signature, list(call.tensors), torch.device("cpu"), traced)
    assert graph.sole_loss is not None
    return Traced(graph.task, parameters, middle - begin, time.process_time() - middle)


def line(case: Case, target: Target) -> tuple[str, ...]:
    """Trace and plan a model; returns its row of the table."""
    found = traced_graph(case, half=target.half)
    built = time.process_time()
    rows = len(next(iter(case.batch.values())))
    planned = Plans(found.task, rows, target)
    head = case.name, f"{found.parameters / 1e9:.2f}"
    try:
        deployment = planned.best()
        text = cells(deployment, planned)
    except DoesNotFitError as exc:
        text = ("nothing fits", "", "", "", "", "", f"needs {exc.needed / GIB:.1f}", "", "")
    end = time.process_time()
    if target.steps:
        print(
            f"{case.name}: {len(found.task.ops)} operators; trace {found.trace_s:.1f} s, graph {found.graph_s:.1f} "
            f"s, blocks and costs {planned.costs_s:.1f} s, search and ranking {planned.best_s:.1f} s; peak memory of "
            f"the process so far {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB",
            file=sys.stderr,
        )
    return *head, *text, f"{found.trace_s:.0f} s, {found.graph_s + end - built:.1f} s"


class Plans:
    """Plans for one graph, made with the same costs; `rows`: rows per device."""

    def __init__(self, graph: TaskGraph, rows: int, target: Target) -> None:
        start = time.process_time()
        self.graph, self.rows, self.target = graph, rows, target
        self.options = replace(PlanOptions.of(Config()), max_partition_num=target.blocks, schedule="1f1b")
        self.blocks = make_blocks(Partitioning.of(graph), self.options, world=target.devices)
        self.slots = tuple(Slot(*place) for place in target.cluster.places(target.devices))
        self.costs = analytic_costs(
            graph,
            [block.ops for block in self.blocks],
            target.cluster,
            fewest=1 if graph.rows_coupled else -(-rows // self.options.max_pipeline),
            most=rows,
            nodes=len({slot.node for slot in self.slots}),
        )
        self.costs_s = time.process_time() - start
        self.best_s = 0.0

    def best(self) -> Deployment:
        """Plan that a job would get. DoesNotFitError if no plan fits."""
        start = time.process_time()
        found = self._plan(self.options, ranked=True)
        self.best_s = time.process_time() - start
        return found

    def data_parallel(self) -> Deployment:
        """Plan with one stage on all devices. DoesNotFitError if it does not fit."""
        return self._plan(replace(self.options, partition_num=1), ranked=True)

    def _plan(self, options: PlanOptions, *, ranked: bool) -> Deployment:
        return plan(
            self.graph,
            self.blocks,
            self.costs,
            world=self.target.devices,
            slots=self.slots,
            batch_rows=self.rows * self.target.devices,
            memory_bytes=self.target.memory,
            options=options,
            ranked=ranked,
        )


def cells(deployment: Deployment, plans: Plans) -> tuple[str, ...]:
    """Cells of the table for a plan."""
    seconds = deployment.step_us / 1e6
    replicas = [len(stage.slots) for stage in deployment.stages]
    again = [number for number, stage in enumerate(deployment.stages) if stage.recompute]
    if len(replicas) == 1:
        alone = "is the plan"
    else:
        try:
            other = plans.data_parallel()
            alone = f"{fullest(other):.1f} GiB, {other.step_us / deployment.step_us:.2f}x"
        except DoesNotFitError as exc:
            alone = f"needs {exc.needed / GIB:.1f} GiB"
    best = next((each for each in deployment.alternatives if not each.over_bytes), None)
    return (
        shape(replicas) + (f", ZeRO {deployment.zero}" if deployment.zero else ""),
        f"{deployment.microbatches} x {-(-plans.rows // deployment.microbatches)}",
        "all" if len(again) == len(replicas) else spans(again) if again else "none",
        f"{deployment.schedule}, {deployment.placement}",
        f"{seconds:.2f} s",
        f"{deployment.batch_rows / seconds:.1f}",
        f"{fullest(deployment):.1f}",
        alone,
        f"{best.name}, {best.step_us / deployment.step_us:.2f}x" if best is not None else "none that fits",
    )


def shape(replicas: list[int]) -> str:
    """Format stages and replicas as '8 stages x 4', or if stages differ, as '3 stages: 1 x 8, 2 x 12'."""
    if len(replicas) == 1:
        return f"{replicas[0]}-way data parallel"
    if len(set(replicas)) == 1:
        return f"{len(replicas)} stages x {replicas[0]}"
    runs: list[list[int]] = []
    for count in replicas:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return f"{len(replicas)} stages: {', '.join(f'{many} x {count}' for many, count in runs)}"


def spans(numbers: list[int]) -> str:
    """Format numbers as ranges, such as '0-3, 7'."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def fullest(deployment: Deployment) -> float:
    """GiB of the device that needs most memory."""
    return fullest_bytes(deployment) / GIB


if __name__ == "__main__":
    main()
