"""Benchmarks of the runtime compared with torch's, two ranks on two cores: data and pipeline parallelism, overhead.

    python bench/runtime.py [data_parallel pipeline bubble zero_bubble overhead tracing memory balanced out_of_the_box]
                            [--rounds 8] [--steps 4]

Both sides of a ratio train the same model in the same processes with the same allocator, in turns; the order is
reversed every other round, and the first round is dropped. One thread per rank. A ratio above 1.0 means that rannd is
faster.

data_parallel  a data-parallel plan compared with DistributedDataParallel (GPT-2, AdamW)
pipeline       two stages compared with torch.distributed.pipelining (1F1B, GPipe), same cut and microbatches
bubble         stages that sleep (50 ms in forward, 100 ms in backward, or in each half of it 50 ms; with two stages on
               each rank half of that) compared with their schedule's ideal time
zero_bubble    two stages of a GPT under zb_h1 compared with 1f1b, 4 and 8 microbatches in the batch
overhead       time per action of the executor, with almost no computation and no communication
tracing        two stages of a GPT with trace_events off, summary and full: wall and CPU time of a step, compared in
               each round; and the time that recording one event takes, times the events of a step
memory         peak bytes of tensors in a step of each rank, compared with the plan and the whole model
balanced       training state of each rank of four equal stages, compared with the whole model's
out_of_the_box the same training script (bench/_gpt2.py: GPT-2, batch and AdamW of data_parallel) as a user starts it,
               without any settings: torchrun with DistributedDataParallel, and rannc-run, which chooses threads and
               malloc settings itself. Each side is a separate job, half as many as rounds; a step is the median of a
               job's steps without the first five
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _in_turns import GptSizes, compare, tell, training
from _results import Spread, Table, found, note
from _starting import RANNC_RUN, TORCHRUN, gpt2, home
from _tensor_bytes import lying, lying_and_peak

BATCH, SEQUENCE, VOCABULARY, WIDTH, LAYERS, HEADS = 8, 128, 8192, 256, 6, 4
MICROBATCHES = 4
"""Microbatches per rank's mini-batch: a pipeline of two ranks runs twice as many."""
SLEEP = 0.050
PLAIN = {"RANNC_LOG_LEVEL": "warn", "OMP_NUM_THREADS": "1"}
JOBS: dict[str, tuple[int, dict[str, str]]] = {
    "data_parallel": (2, {"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "1"}),
    "pipeline": (2, {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": str(MICROBATCHES)}),
    "bubble": (4, {"RANNC_PARTITION_NUM": "4", "RANNC_PIPELINE_NUM": "4"}),
    "zero_bubble": (2, {"RANNC_PARTITION_NUM": "2"}),
    "overhead": (1, {"RANNC_PARTITION_NUM": "1", "RANNC_PIPELINE_NUM": "32"}),
    "tracing": (2, {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": str(MICROBATCHES)}),
    "memory": (2, {"RANNC_PARTITION_NUM": "2", "RANNC_PIPELINE_NUM": str(MICROBATCHES)}),
    "balanced": (4, {"RANNC_PARTITION_NUM": "4", "RANNC_PIPELINE_NUM": "1"}),
}
"""(ranks, variables that force the plan) of each measurement."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[*JOBS, "out_of_the_box", []], help="benchmarks (default: all)")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of each side in a round")
    options = parser.parse_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        globals()[options.what[0]](options.rounds, options.steps)
        return
    runner = Path(sysconfig.get_path("scripts")) / "rannc-run"
    for name in options.what or [*JOBS, "out_of_the_box"]:
        if name == "out_of_the_box":
            out_of_the_box(max(2, options.rounds // 2), options.steps)
            continue
        ranks, plan = JOBS[name]
        command = [str(runner), "-np", str(ranks), "--show-ranks", "0", __file__, name]
        command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
        done = subprocess.run(command, env={**os.environ, **PLAIN, **plan}, check=False)
        if done.returncode:
            sys.exit(done.returncode)


class Gpt:
    """A GPT of plain modules, as a list of parts or as one model."""

    def parts(self) -> list[Any]:
        import torch
        from torch import Tensor, nn

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
                self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
                self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                q, k, v = self.qkv(self.one(x)).unflatten(-1, (3, HEADS, -1)).movedim(-2, 1).unbind(3)
                mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + self.out(mixed.movedim(1, 2).flatten(2))
                return x + self.down(nn.functional.gelu(self.up(self.two(x))))

        class Embed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)

            def forward(self, tokens: Tensor) -> Tensor:
                return self.tokens(tokens) + self.places.weight

        torch.manual_seed(0)
        head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
        return [Embed(), *(Block() for _ in range(LAYERS)), head]

    @staticmethod
    def loss(logits: Any, tokens: Any) -> Any:
        from torch import nn

        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def whole(self, cut: int | None) -> Any:
        """One model of all parts, with a CutPoint before part `cut`, if it is not None."""
        from torch import Tensor, nn

        import pyrannc

        gpt = self

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = nn.ModuleList(gpt.parts())
                self.cut = pyrannc.CutPoint() if cut is not None else nn.Identity()

            def forward(self, tokens: Tensor) -> Tensor:
                x = tokens
                for number, part in enumerate(self.parts):
                    x = part(self.cut(x) if number == cut else x)
                return gpt.loss(x, tokens)

        return Whole()


def data_parallel(rounds: int, steps: int) -> None:
    """Compare data parallelism: GPT-2 of transformers, random tokens, no dropout."""
    from torch.nn.parallel import DistributedDataParallel

    import pyrannc

    sizes = GptSizes(LAYERS, WIDTH, VOCABULARY, SEQUENCE, BATCH)
    ours = training(sizes, pyrannc.get_rank(), pyrannc.RaNNCModule).step
    ours()  # connects the ranks
    theirs = training(sizes, pyrannc.get_rank(), lambda model, _: DistributedDataParallel(model)).step
    sides = {"rannd": ours, "DistributedDataParallel": theirs}
    ratios = compare("GPT-2, data parallel, two ranks", sides, rounds, steps)
    found("data-parallel", ratios["rannd / DistributedDataParallel"])


def pipeline(rounds: int, steps: int) -> None:
    """Compare pipeline parallelism: a GPT of plain modules, from which torch's stages are built directly."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    import pyrannc

    gpt = Gpt()
    rank, world = pyrannc.get_rank(), pyrannc.get_world_size()
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(VOCABULARY, (world * BATCH, SEQUENCE), generator=generator)

    for cut in (LAYERS // 2 + 1, LAYERS // 2 + 2):

        def ours(cut: int = cut) -> Callable[[], None]:
            model = gpt.whole(cut)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            wrapped = pyrannc.RaNNCModule(model, optimizer)
            mine = batch[rank * BATCH : (rank + 1) * BATCH]

            def step() -> None:
                optimizer.zero_grad()
                wrapped(mine).backward()
                optimizer.step()

            return step

        def theirs(schedule: type, cut: int = cut) -> Callable[[], None]:
            modules = gpt.parts()
            stage_module = nn.Sequential(*(modules[:cut] if rank == 0 else modules[cut:]))
            optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-4)
            stage = PipelineStage(stage_module, rank, world, torch.device("cpu"))
            runs = schedule(stage, n_microbatches=world * MICROBATCHES, loss_fn=gpt.loss)

            def step() -> None:
                optimizer.zero_grad()
                runs.step(batch) if rank == 0 else runs.step(target=batch)
                optimizer.step()

            return step

        own = ours()
        own()
        assert dist.is_initialized()
        pieces = world * MICROBATCHES
        title = f"GPT, two stages, cut before part {cut} of {LAYERS + 2}, {pieces} microbatches in the batch"
        sides = {"rannd": own, "torch 1F1B": theirs(Schedule1F1B), "torch GPipe": theirs(ScheduleGPipe)}
        found("pipeline-torch", compare(title, sides, rounds, steps)["rannd / torch 1F1B"], f"cut before part {cut}")
        pyrannc.clear()


def bubble(rounds: int, steps: int) -> None:
    """Measure the bubble of four ranks whose forwards and halves of backwards sleep to last a fixed time.

    Ranks with two stages have stages that last half as long.
    """
    import torch
    from torch import nn

    import pyrannc
    from rannd.plan.schedule.virtual_stages import VIRTUAL_SCHEDULES

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).square().mean()

    def lasting(seconds: float, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run` so that it takes `seconds`; it sleeps, but spins at the end because sleeping overshoots."""

        def slowly(*values: Any, **options: Any) -> Any:
            end = time.perf_counter() + seconds
            values = run(*values, **options)
            time.sleep(max(0.0, end - time.perf_counter() - 3e-4))
            while time.perf_counter() < end:
                pass
            return values

        return slowly

    world = pyrannc.get_world_size()
    waits: dict[str, float] = {}
    table = Table(
        f"Stages that sleep, {world} ranks: F, B and W of {1e3 * SLEEP:.0f} ms, {rounds} steps",
        "schedule", "stages", "microbatches", ("step", "{:.3f} s"), ("ideal", "{:.3f} s"), "ideal / measured",
        ("bubble", "{:.3f}"), ("waits, of 1f1b's", "{:.2f}"),
    )  # fmt: skip
    for schedule in ("1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v"):
        passes = 2 if schedule in VIRTUAL_SCHEDULES else 1
        os.environ["RANNC_SCHEDULE"], os.environ["RANNC_VIRTUAL_STAGES"] = schedule, str(passes)
        os.environ["RANNC_PARTITION_NUM"] = str(passes * world)
        model = pyrannc.RaNNCModule(Model())
        x = torch.randn(8, 512)
        model(x).backward()
        executor = next(model._session._graphs.executors())
        assert len(executor.stages) == passes
        splits = schedule in ("zb_h1", "zb_v")
        assert all(stage.splits == splits for stage in executor.bound.stages), "a stage is not planned as its schedule"
        unit = SLEEP / passes
        for computing in executor.stages.values():
            computing.forward = lasting(unit, computing.forward)
            computing.backward = lasting(unit if splits else 2 * unit, computing.backward)
            computing.weights = lasting(unit, computing.weights)
        pieces = world * executor.bound.layout.microbatches
        times = []
        for _ in range(rounds):
            pyrannc.barrier()
            start = time.perf_counter()
            model(x).backward()
            pyrannc.barrier()
            times.append(time.perf_counter() - start)
        ideal = (3 * pieces + (world - 1) * (1 if splits else 3) / passes) * SLEEP
        step = Spread.of(times)
        waits[schedule] = step.median - 3 * pieces * SLEEP
        share = waits[schedule] / waits["1f1b"]
        of_ideal = Spread.of([ideal / each for each in times])
        table.row(schedule, passes * world, pieces, step, ideal, of_ideal, waits[schedule] / step.median, share)
        if schedule == "1f1b":
            found("bubble", of_ideal.median)
        if schedule == "zb_h1":
            found("zb-idle", share)
        pyrannc.clear()


def zero_bubble(rounds: int, steps: int) -> None:
    """Compare zero-bubble with 1F1B on a GPT of plain modules in two stages, cut at the same place."""
    import torch

    import pyrannc

    rank, world = pyrannc.get_rank(), pyrannc.get_world_size()
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(rank))
    cpu: dict[str, float] = {}
    """CPU seconds of backwards, by schedule."""

    def side(schedule: str, micro: int) -> Callable[[], None]:
        os.environ.update(RANNC_SCHEDULE=schedule, RANNC_PIPELINE_NUM=str(micro))
        model = Gpt().whole(LAYERS // 2 + 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        wrapped = pyrannc.RaNNCModule(model, optimizer)

        def step() -> None:
            optimizer.zero_grad()
            wrapped(tokens).backward()
            optimizer.step()

        def counted(run: Callable[..., Any]) -> Callable[..., Any]:
            def counting(*values: Any) -> Any:
                start = time.process_time()
                values = run(*values)
                cpu[schedule] += time.process_time() - start
                return values

            return counting

        step()
        cpu[schedule] = 0.0
        (computing,) = next(wrapped._session._graphs.executors()).stages.values()
        computing.backward, computing.weights = counted(computing.backward), counted(computing.weights)
        if rank == 0:
            each = [stage.estimate for stage in wrapped.deployment.stages]
            parts = [
                [round(us / one.pieces / 1e3, 1) for us in (one.forward_us, one.backward_us, one.weight_us)]
                for one in each
            ]
            planned = wrapped.deployment.step_us / 1e3
            note(f"{schedule} planned: {planned:.1f} ms; forward, backward, of it W of a microbatch by stage: {parts}")
        return step

    for micro in (MICROBATCHES // world, MICROBATCHES):
        title = f"GPT, {world} stages, {world * micro} microbatches in the batch"
        ratios = compare(title, {name: side(name, micro) for name in ("zb_h1", "1f1b")}, rounds, steps)
        if world * micro == 4:
            found("zb-step", ratios["zb_h1 / 1f1b"])
        told: list[Any] = [None] * world
        torch.distributed.all_gather_object(told, cpu["zb_h1"] / cpu["1f1b"])
        shares = ", ".join(f"{each:.3f}" for each in told)
        note(f"CPU time of both halves / of whole backwards, by stage: {shares}")
        pyrannc.clear()


def overhead(rounds: int, steps: int) -> None:
    """Measure the executor's CPU time: a step of 32 microbatches of one row, minus their forwards and backwards."""
    import torch
    from torch import nn

    import pyrannc

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).square().mean()

    model = pyrannc.RaNNCModule(Model())
    x = torch.randn(32, 4)
    model(x).backward()
    executor = next(model._session._graphs.executors())
    part = executor.bound.stages[0].part
    (tensors,) = executor.stages[0]._tensors
    weights = [torch.ones((), dtype=torch.float64) for _ in range(len(part.inputs) - 1)]
    numbers = part.numbers_at(1)

    def alone() -> None:
        for piece in range(32):
            (loss,) = part.module(x[piece : piece + 1], *weights, *tensors, *numbers)
            loss.backward()

    steps_s, bare = [], []
    for _ in range(rounds * 10):
        start = time.process_time()
        model(x).backward()
        between = time.process_time()
        alone()
        steps_s.append(between - start)
        bare.append(time.process_time() - between)
    actions = 2 * 32
    ours = 1e6 * (statistics.median(steps_s) - statistics.median(bare)) / actions
    table = Table(
        "CPU time of the executor", ("actions", "{:.0f}"), ("step", "{:.2f} ms"), ("of it computation", "{:.2f} ms"),
        ("for an action", "{:.0f} us"),
    )  # fmt: skip
    table.row(actions, Spread.of(steps_s, 1e3), Spread.of(bare, 1e3), ours)
    found("action", ours)


def tracing(rounds: int, steps: int) -> None:
    """Compare steps that are recorded with steps that are not, and measure what an event costs."""
    import torch

    import pyrannc
    from rannd.runtime.timeline.recorder import Doing

    rank = pyrannc.get_rank()
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(rank))
    modes = ("off", "summary", "full")
    wall: dict[str, list[float]] = {mode: [] for mode in modes}
    cpu: dict[str, list[float]] = {mode: [] for mode in modes}
    taken: dict[str, float] = {}
    """Microseconds of an event."""
    events = 0

    def side(mode: str) -> tuple[Callable[[], None], Any]:
        os.environ["RANNC_TRACE_EVENTS"] = mode
        model = Gpt().whole(LAYERS // 2 + 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        wrapped = pyrannc.RaNNCModule(model, optimizer)

        def step() -> None:
            optimizer.zero_grad()
            wrapped(tokens).backward()
            optimizer.step()

        for _ in range(3):
            step()
        return step, wrapped._session._context.recorder

    sides = {mode: side(mode) for mode in modes}
    for number in range(rounds + 1):
        for mode in modes[:: 1 if number % 2 else -1]:
            pyrannc.barrier()
            start, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                sides[mode][0]()
            cpu[mode].append((time.process_time() - used) / steps)
            pyrannc.barrier()
            wall[mode].append((time.perf_counter() - start) / steps)
    for mode in modes[1:]:
        recorder = sides[mode][1]
        row = recorder.rows()[-1]
        events = sum(count for count, _ in row.sums.values())
        recorder.begin_step(0)  # one that is recorded, as the first ones are
        turns = 20_000
        start = time.process_time()
        for _ in range(turns):
            recorder.end(Doing.FORWARD, 0, 0, None, recorder.begin())
        taken[mode] = 1e6 * (time.process_time() - start) / turns
    told: list[Any] = [None] * pyrannc.get_world_size()
    torch.distributed.all_gather_object(told, cpu)
    if rank:
        return
    both = {mode: [sum(each) for each in zip(*(one[mode] for one in told), strict=True)] for mode in modes}
    table = Table(
        f"Recording of events, {rounds} rounds of {steps} steps", "trace_events", ("step", "{:.1f} ms"),
        "step / that of off", "CPU time / that of off", "events of rank 0 in a step", ("an event", "{:.2f} us"),
        ("of the step", "{:.3%}"),
    )  # fmt: skip
    step_us = 1e6 * statistics.median(wall["off"][1:])
    table.row("off", Spread.of(wall["off"][1:], 1e3), None, None, None, None, None)
    for mode in modes[1:]:
        part = events * taken[mode] / step_us
        ratios = [
            Spread.of([one / other for one, other in zip(times[mode][1:], times["off"][1:], strict=True)])
            for times in (wall, both)
        ]
        table.row(mode, Spread.of(wall[mode][1:], 1e3), *ratios, events, taken[mode], part)
        found("tracing", part, mode)


def memory(rounds: int, steps: int) -> None:
    """Measure bytes of tensors with torch's profiler: before a step, and the peak during it."""
    import torch
    import torch.distributed as dist

    import pyrannc
    from rannd.plan.slot_memory import slot_bytes

    rank, world = pyrannc.get_rank(), pyrannc.get_world_size()
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    model = Gpt().whole(None)
    whole = 4 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    wrapped = pyrannc.RaNNCModule(model, optimizer)

    def step() -> None:
        wrapped(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    base, most = lying_and_peak(step, wrapped, optimizer)
    numbers = torch.tensor([base, most, slot_bytes(wrapped.deployment, wrapped._session.world.slot)])
    told = [torch.empty_like(numbers) for _ in range(world)]
    dist.all_gather(told, numbers)
    mib = "{:.1f} MiB"
    table = Table(
        "Bytes of tensors, two stages", "rank", ("before the step", mib), ("peak", mib), ("planned", mib),
        ("training state of the whole model", mib), "peak / planned",
    )  # fmt: skip
    for each, (before, peak, planned) in enumerate(part.tolist() for part in told):
        table.row(each, *(size / 2**20 for size in (before, peak, planned, whole)), peak / planned)
        found("memory-planned", peak / planned, f"rank {each}")


def balanced(rounds: int, steps: int) -> None:
    """Measure what ranks of four equal stages have of the training state."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import pyrannc

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(8))
            self.cut = pyrannc.CutPoint()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x if number % 2 else self.cut(x))
            return x.square().mean()

    torch.manual_seed(0)
    model = Model()
    whole = 4 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 512)).backward()
        optimizer.step()
    told = [torch.zeros((), dtype=torch.float64) for _ in range(pyrannc.get_world_size())]
    dist.all_gather(told, torch.tensor(sum(lying(wrapped, optimizer)), dtype=torch.float64))
    mib = "{:.2f} MiB"
    table = Table(
        "Training state, four equal stages",
        "rank",
        ("state", mib),
        ("whole model's", mib),
        "share",
    )
    for rank, size in enumerate(each.item() for each in told):
        table.row(rank, size / 2**20, whole / 2**20, size / whole)
    found("memory-share", max(each.item() for each in told) / whole)


def out_of_the_box(rounds: int, steps: int) -> None:
    """Compare jobs as users start them."""
    dropped = 5
    size = {
        "steps": dropped + 4 * steps, "rows": BATCH, "length": SEQUENCE, "words": VOCABULARY, "width": WIDTH,
        "layers": LAYERS,
    }  # fmt: skip
    given = [word for name, value in size.items() for word in (f"--{name}", str(value))]
    forced = JOBS["data_parallel"][1]
    sides: dict[str, tuple[list[str], str, dict[str, str]]] = {
        "rannc-run": (RANNC_RUN, "rannd", {}),
        "rannc-run, data parallel": (RANNC_RUN, "rannd", forced),
        "data parallel, --no-tune": ([*RANNC_RUN, "--no-tune"], "rannd", forced),
        "torchrun": (TORCHRUN, "ddp", {}),
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    with home() as environment:
        for number in range(rounds + 1):
            for name in list(sides)[:: 1 if number % 2 else -1]:
                launcher, side, plan = sides[name]
                _, told = gpt2(launcher, side, {**environment, **plan}, *given)
                ends = told[0]["ends"][dropped - 1 :]
                times[name].append(statistics.median(b - a for a, b in itertools.pairwise(ends)))
    tell("The same script as users start it", {name: values[1:] for name, values in times.items()})


if __name__ == "__main__":
    main()
