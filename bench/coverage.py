"""Traces the models of tests/zoo with rannd and with torch.distributed.pipelining, and counts the successes.

    python bench/coverage.py [--rows 4] [--limit 120] [MODEL ...]

Each model is traced in training mode, and its outputs, gradients and buffers are compared with those of eager mode
(float64 with a tolerance of 1e-9). rannd's graph is run whole and cut into three stages; `pipeline()` gets one split
point, in the middle of the model's largest list of layers, if it has one. Some of the parameters may be in leaves:
submodules that run as one operator each, because their code cannot be traced. Each side runs in a separate process, so
that a crash or a hang affects only one line of the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _results import Cell, Table, found

TESTS = Path(__file__).resolve().parent.parent / "tests"
SIDES = ("rannd", "pipelining")
MOST_IN_LEAVES = 0.2

Line = dict[str, Any]
"""Result of one side for a model: `error`, or `wrong` (None if the results are equal), `seconds` and more."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names of models (default: all)")
    parser.add_argument("--rows", type=int, default=4, help="batch size that pipeline() traces and both are run with")
    parser.add_argument("--limit", type=float, default=120, help="time limit per model in seconds")
    parser.add_argument("--work", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS / "graph")]
    from zoo import ZOO

    known = {entry.name: entry for entry in ZOO}
    if options.work:
        work(options.work, known, options.rows, options.report)
        return
    unknown = sorted(set(options.models) - set(known))
    if unknown:
        parser.error(f"the zoo has no {', '.join(unknown)}; it has {', '.join(known)}")
    names = [name for name in known if not options.models or name in options.models]
    table = Table(
        f"{len(names)} models, batches of {options.rows}", "model", "rannd", ("leaves", "{:d}"),
        ("parameters in leaves", "{:.1%}"), ("nodes", "{:d}"), ("trace", "{:.2f} s"), "torch's pipeline()",
    )  # fmt: skip
    lines: dict[str, list[Line]] = {side: [] for side in SIDES}
    with contextlib.ExitStack() as stack:
        workers = {side: stack.enter_context(Worker(side, options.rows, options.limit)) for side in SIDES}
        for name in names:
            for side, worker in workers.items():  # one after the other, because they are timed
                lines[side].append(worker.ask(name))
            table.row(name, *_cells(lines["rannd"][-1], lines["pipelining"][-1]))
    ours, theirs = ([line for line in lines[side] if "error" not in line] for side in SIDES)
    enough = [line for line in ours if line["share"] <= MOST_IN_LEAVES]
    sums = Table("Of all models", "what", "rannd", "torch's pipeline()")
    sums.row("runs without an error", len(ours), len(theirs))
    right = [[line for line in each if line["wrong"] is None] for each in (ours, theirs, enough)]
    sums.row("outputs, gradients and buffers equal to eager", len(right[0]), len(right[1]))
    sums.row(f"of these at most {MOST_IN_LEAVES:.0%} of the parameters in leaves", len(right[2]), None)
    found("coverage", len(right[2]) / len(names), f"{len(right[2])} of {len(names)} models")


def _cells(ours: Line, theirs: Line) -> list[Cell]:
    left: list[Cell]
    if "error" in ours:
        left = [ours["error"][:52], None, None, None, None]
    else:
        outcome = "traced" if not ours["leaves"] else "one leaf" if ours["whole"] else "traced with leaves"
        outcome = outcome if ours["wrong"] is None else f"{outcome}, WRONG"
        left = [outcome, ours["leaves"], ours["share"], ours["nodes"], ours["seconds"]]
    if "error" in theirs:
        right = theirs["error"]
    elif theirs["wrong"] is None:
        right = f"traced, {theirs['stages']} stage{'s' if theirs['stages'] > 1 else ''}, {theirs['seconds']:.2f}s"
    else:
        right = f"traced, WRONG: {theirs['wrong']}"
    return [*left, right[:110]]


class Worker:
    """Worker process of one side, restarted after it crashed or hung."""

    def __init__(self, side: str, rows: int, limit: float) -> None:
        self._side, self._rows, self._limit = side, rows, limit
        self._process: subprocess.Popen[bytes] | None = None
        self._reports = -1

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, name: str) -> Line:
        """Let the process trace a model; returns its result."""
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(name.encode() + b"\n")
        self._process.stdin.flush()
        answer = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reports, selectors.EVENT_READ)
            while not answer.endswith(b"\n"):
                if not selector.select(self._limit):
                    self._end()
                    return {"error": f"took longer than {self._limit:.0f} s"}
                chunk = os.read(self._reports, 65536)
                if not chunk:
                    code = self._process.wait()
                    self._end()
                    return {"error": f"its process ended with exit code {code}"}
                answer += chunk
        found: Line = json.loads(answer)
        return found

    def _start(self) -> None:
        self._reports, writing = os.pipe()
        command = [sys.executable, "-W", "ignore", __file__, "--rows", str(self._rows)]
        self._process = subprocess.Popen(
            [*command, "--work", self._side, "--report", str(writing)],
            pass_fds=(writing,),
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(writing)

    def _end(self) -> None:
        if self._process is None:
            return
        os.close(self._reports)
        self._process.kill()  # no effect if it has ended
        with self._process:  # closes its standard input, and waits
            self._process = None


def work(side: str, entries: Mapping[str, Any], rows: int, report: int) -> None:
    """Main function of a worker: for each name on standard input, trace the model and write a line of JSON."""
    import logging

    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)

    def line(name: str) -> Line:
        entry = entries[name]
        try:
            with entry.precision():
                return _rannd(entry, rows) if side == "rannd" else _pipelining(entry, rows)
        except Exception as exc:
            return {"error": f"{type(exc).__name__}: {_first_line(exc)}"}

    line("bert")  # warm-up: imports and caches of the first model are not timed
    for name in sys.stdin:
        os.write(report, json.dumps(line(name.rstrip("\n"))).encode() + b"\n")


def _rannd(entry: Any, rows: int) -> Line:
    import torch
    from specimens import specimen_of
    from stages import balanced_stages

    start = time.perf_counter()
    specimen = specimen_of(entry)
    seconds = time.perf_counter() - start
    graph = specimen.graph
    wrong = None
    try:
        torch.manual_seed(1)
        specimen.compare(entry.batch(rows), dict.fromkeys(graph.placement.placed, 0), balanced_stages(graph, 3))
    except Exception as exc:
        wrong = _first_line(exc)
    paths = graph.traced.leaf_paths
    return {
        "wrong": wrong, "leaves": len(paths), "whole": "" in paths, "share": specimen.share_in_leaves,
        "nodes": len(graph.nodes), "seconds": seconds,
    }  # fmt: skip


def _pipelining(entry: Any, rows: int) -> Line:
    import copy

    import torch
    from specimens import TOLERANCE, seeded
    from torch.distributed.pipelining import SplitPoint, pipeline
    from torch.utils import _pytree as pytree

    torch.manual_seed(11)
    model = entry.build()
    own = copy.deepcopy(model)
    batch = entry.batch(rows)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module) > 1
    }
    spec = None
    if lists:
        name = max(lists, key=lambda each: sum(p.numel() for p in lists[each].parameters()))
        spec = {f"{name}.{len(lists[name]) // 2}": SplitPoint.BEGINNING}
    start = time.perf_counter()
    pipe = pipeline(model, mb_args=(), mb_kwargs=batch, split_spec=spec)
    seconds = time.perf_counter() - start

    def stages(**arguments: Any) -> Any:
        """Run all stages in sequence. Pipe's own forward lets no gradients pass between stages."""
        leaves, _ = pytree.tree_flatten_with_path(arguments)
        named = {"_".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): leaf for path, leaf in leaves}
        taken = [named[node.target] for node in pipe.split_gm.graph.nodes if node.op == "placeholder"]
        return torch.fx.Interpreter(pipe.split_gm).run(*taken)

    def tensors_of(function: Any) -> list[Any]:
        seeded(0)
        return [value for value in pytree.tree_leaves(function(**batch)) if isinstance(value, torch.Tensor)]

    def differentiate(values: Sequence[Any]) -> None:
        roots = [value for value in values if value.requires_grad]
        torch.autograd.backward(roots, [torch.linspace(0.5, 1.5, v.numel(), dtype=v.dtype).view_as(v) for v in roots])

    ids = {id(parameter) for parameter in model.parameters()}
    copies = [name.removeprefix("split_gm.") for name, parameter in pipe.named_parameters() if id(parameter) not in ids]
    wrong = f"tied parameters are untied: {', '.join(copies)}" if copies else None
    within = TOLERANCE[entry.dtype]
    near: dict[str, Any] = {"rtol": within, "atol": within / 10, "equal_nan": True}
    try:
        expected, found = tensors_of(own), tensors_of(stages)
        for value, other in zip(found, expected, strict=True):
            torch.testing.assert_close(value, other, **near)
        differentiate(expected)
        differentiate(found)
        for (name, parameter), other in zip(model.named_parameters(), own.parameters(), strict=True):
            zero = torch.zeros_like(other)
            torch.testing.assert_close(
                zero if parameter.grad is None else parameter.grad,
                zero if other.grad is None else other.grad,
                **near,
                msg=lambda m, n=name: f"gradient of {n}: {m}",
            )
        for (name, buffer), other in zip(model.named_buffers(), own.buffers(), strict=True):
            torch.testing.assert_close(buffer, other, **near, msg=lambda m, n=name: f"buffer {n}: {m}")
    except Exception as exc:
        wrong = wrong or _first_line(exc)
    return {"wrong": wrong, "stages": pipe.num_stages, "seconds": seconds}


def _first_line(problem: BaseException) -> str:
    """Message of an exception's root cause, joined to one line."""
    cause = problem
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return " ".join((str(cause).strip() or type(cause).__name__).split())[:200]


if __name__ == "__main__":
    main()
