"""One rank beside eager PyTorch: float64 to 1e-9, low precision no less exact than eager's; tests marked gpu."""

from __future__ import annotations

import copy
import functools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from _gpu.alike import CLOSE, Pair, adamw, distance, gradients, relative_error, worst_of
from _gpu.machine import ROOT, Here, variables
from _gpu.models import Convolutions, Mlp, Text, images, loss_of, numbers, on, tokens
from _gpu.ranks import run
from _gpu.record import Check, Result, at_least, at_most
from rannd.device.generators import generator_states

WORDS, LENGTH = 97, 16
NO_WORSE = 1.5
"""Largest error of low precision, in errors that eager PyTorch has itself."""
TESTS_S = 180
"""Seconds that the tests may take."""


def checks(here: Here) -> list[Check]:
    """All checks of this part."""
    listed: list[tuple[str, Callable[[Here], Iterable[Result]]]] = [
        ("model on the CPU", _on_the_cpu),
        ("model on the device", _on_the_device),
        ("inputs on the CPU", _inputs_elsewhere),
        ("BatchNorm", _batch_norm),
        ("loss outside of the model", _outside),
        ("fused AdamW", _fused),
        ("accumulation and clipping", _accumulated),
        ("evaluation, lengths and rows", _lengths),
        ("microbatches", _microbatches),
        ("recomputation", _recomputing),
        ("autocast to bfloat16", functools.partial(_low_precision, torch.bfloat16)),
        ("autocast to float16 with GradScaler", functools.partial(_low_precision, torch.float16)),
        ("dropout", _dropout),
        ("checkpoint", _checkpoint),
        ("undeploy", _undeploy),
        ("a launcher's single rank", _launched),
        ("tests marked gpu", _tests),
    ]
    return [(name, functools.partial(_cleared, check, here)) for name, check in listed]


def _cleared(check: Callable[[Here], Iterable[Result]], here: Here) -> Iterator[Result]:
    import pyrannc

    try:
        yield from check(here)
    finally:
        pyrannc.clear()


def _gpt(seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    return Text(2, 32, WORDS, LENGTH, dropout).double()


def _texts(count: int, rows: int = 6, length: int = LENGTH) -> list[dict[str, Tensor]]:
    return [tokens(seed, rows, length, WORDS) for seed in range(count)]


def _made(kind: type[nn.Module], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options).double()


def _on_the_cpu(here: Here) -> Iterator[Result]:
    with variables():
        pair = Pair(_gpt(), adamw, here.device)
        yield at_most("GPT-2, wrapped on the CPU", worst_of(pair, _texts(3)), CLOSE)
        types = {each.device.type for each in pair.inner.parameters()}
        yield Result("its parameters' device", types == {here.device.type}, ", ".join(sorted(types)))


def _on_the_device(here: Here) -> Iterator[Result]:
    with variables():
        pair = Pair(_gpt(), adamw, here.device, moved=True)
        yield at_most("GPT-2, wrapped on the device", worst_of(pair, _texts(3)), CLOSE)


def _inputs_elsewhere(here: Here) -> Iterator[Result]:
    with variables():
        pair = Pair(_gpt(), adamw, here.device)
        yield at_most("GPT-2 with inputs on the CPU", worst_of(pair, _texts(2), torch.device("cpu")), CLOSE)
        given = on(tokens(9, 4, LENGTH, WORDS), torch.device("cpu"))
        types = {pair.wrapped(**given)["logits"].device.type}
        yield Result("outputs for inputs on the CPU", types == {"cpu"}, ", ".join(types))


def _batch_norm(here: Here) -> Iterator[Result]:
    with variables():
        pair = Pair(_made(Convolutions), adamw, here.device)
        batches = [images(seed, 12) for seed in range(3)]
        yield at_most("convolutions with BatchNorm", max(worst_of(pair, batches), pair.evaluate(batches[0])), CLOSE)


def _outside(here: Here) -> Iterator[Result]:
    with variables():
        pair = Pair(_made(Mlp), adamw, here.device)
        yield at_most("linear layers", worst_of(pair, [numbers(seed, 8) for seed in range(3)]), CLOSE)


def _fused(here: Here) -> Iterator[Result]:
    with variables():
        make = functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True)
        pair = Pair(_gpt(), make, here.device, moved=True)  # it refuses a mixture of devices
        yield at_most("GPT-2 with fused AdamW", worst_of(pair, _texts(3)), CLOSE)


def _accumulated(here: Here) -> Iterator[Result]:
    with variables():
        pair, worst = Pair(_gpt(), adamw, here.device), 0.0
        for batches in (_texts(2), _texts(4)[2:]):
            for each in (pair.mine, pair.theirs):
                each.zero_grad()
            for batch in batches:
                worst = max(worst, pair.call(batch))
            norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (pair.wrapped, pair.eager)]
            worst = max(worst, distance(*norms))
            for each in (pair.mine, pair.theirs):
                each.step()
        yield at_most("two backwards a step, clipped", max(worst, pair.step(_texts(1)[0])), CLOSE)


def _lengths(here: Here) -> Iterator[Result]:
    with variables():
        pair, worst = Pair(_gpt(), adamw, here.device), 0.0
        for rows, length in ((6, LENGTH), (6, LENGTH // 2), (3, LENGTH // 2), (1, LENGTH), (6, LENGTH)):
            (batch,) = _texts(1, rows, length)
            worst = max(worst, pair.step(batch), pair.evaluate(batch))
        yield at_most("training and evaluation in turns, three lengths, 1 to 6 rows", worst, CLOSE)


def _microbatches(here: Here) -> Iterator[Result]:
    for rows in (8, 7):
        with variables(PIPELINE_NUM="4"):
            pair = Pair(_gpt(), adamw, here.device)
            yield at_most(f"4 microbatches of {rows} rows", worst_of(pair, _texts(2, rows)), CLOSE)
            count = pair.wrapped.deployment.microbatches
            yield Result("microbatches in the plan", count == 4, count)


def _recomputing(here: Here) -> Iterator[Result]:
    with variables(CHECKPOINTING="true", PIPELINE_NUM="2"):
        pair = Pair(_gpt(), adamw, here.device)
        yield at_most("recomputation, 2 microbatches", worst_of(pair, _texts(2)), CLOSE)
        recomputes = all(stage.recompute for stage in pair.wrapped.deployment.stages)
        yield Result("the plan recomputes", recomputes, str(recomputes))


def _low_precision(dtype: torch.dtype, here: Here) -> Iterator[Result]:
    """Three steps, for float16 with a scale that overflows at first; compared with float64."""

    def around() -> AbstractContextManager[Any]:
        return torch.autocast(here.device.type, dtype=dtype)

    scaled = dtype == torch.float16
    name = "float16 with GradScaler" if scaled else "bfloat16"
    scalers = [torch.amp.GradScaler(here.device.type, init_scale=2.0**20, enabled=scaled) for _ in range(2)]

    def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2)

    with variables():
        options = {"scaler": scalers[0]} if scaled else {}
        pair = Pair(_gpt().float(), sgd, here.device, around=around, **options)
        right = copy.deepcopy(pair.eager).double()
        sides = ((pair.wrapped, pair.inner, pair.mine, scalers[0]), (pair.eager, pair.eager, pair.theirs, scalers[1]))
        worst, scales, skipped = 0.0, [], 0
        for batch in _texts(12 if scaled else 3):
            given = on(batch, here.device)
            right.load_state_dict({key: value.double() for key, value in pair.eager.state_dict().items()})
            right.zero_grad()
            loss_of(right(**given)).backward()
            errors = []
            for model, inner, optimizer, scaler in sides:
                optimizer.zero_grad()
                with around():
                    loss = loss_of(model(**given))
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                errors.append(relative_error(gradients(inner), gradients(right)))
                scaler.step(optimizer)
                scaler.update()
            scales.append([scaler.get_scale() for scaler in scalers])
            overflown = [not math.isfinite(error) for error in errors]
            skipped += all(overflown)
            assert overflown[0] == overflown[1], f"one side alone overflows: {errors}"
            if not any(overflown):
                worst = max(worst, errors[0] / errors[1])
        yield at_most(f"{name}: error of gradients / eager's", worst, NO_WORSE)
        if scaled:
            same = all(mine == theirs for mine, theirs in scales)
            yield Result("scales equal eager's", same, f"{scales[0][0]:g} to {scales[-1][0]:g}")
            yield at_least("steps that overflow", skipped, 1)


def _dropout(here: Here) -> Iterator[Result]:
    def trained(seed: int, **plan: str) -> Tensor:
        with variables(PIPELINE_NUM="2", **plan):
            import pyrannc

            inner = _gpt(dropout=0.2)
            optimizer = torch.optim.SGD(inner.parameters(), lr=1e-2)
            torch.manual_seed(seed)
            model = pyrannc.RaNNCModule(inner, optimizer)
            for batch in _texts(2):
                optimizer.zero_grad()
                before = generator_states()
                loss_of(model(**on(batch, here.device))).backward()
                pairs = zip(generator_states(), before, strict=True)
                assert all(torch.equal(*pair) for pair in pairs), "a generator of the script has moved"
                optimizer.step()
            return torch.cat([each.detach().cpu().flatten() for each in inner.parameters()])

    first = trained(3)
    yield at_most("dropout, the same seed and plan", distance(trained(3), first), CLOSE)
    yield at_most("dropout, recomputed", distance(trained(3, CHECKPOINTING="true"), first), CLOSE)
    yield at_least("dropout, another seed", distance(trained(4), first), 1e-6)


def _checkpoint(here: Here) -> Iterator[Result]:
    import pyrannc

    def begin(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        inner = _gpt(seed, dropout=0.1)
        optimizer = adamw(inner.parameters())
        return inner, optimizer, pyrannc.RaNNCModule(inner, optimizer)

    def go_on(optimizer: torch.optim.Optimizer, model: Any, batches: list[dict[str, Tensor]]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model(**on(batch, here.device))).backward()
            optimizer.step()

    batches = _texts(4)
    with variables(), tempfile.TemporaryDirectory() as folder:
        inner, optimizer, model = begin(0)
        go_on(optimizer, model, batches[:2])
        pyrannc.save_checkpoint(Path(folder) / "now", model, optimizer, step=2)
        pyrannc.save_checkpoint(Path(folder) / "beside", model, optimizer, step=2, asynchronous=True).wait()
        go_on(optimizer, model, batches[2:])
        for name in ("now", "beside"):
            other, its, resumed = begin(1)
            step = pyrannc.load_checkpoint(Path(folder) / name, resumed, its).step
            go_on(its, resumed, batches[step:])
            pairs = zip(other.parameters(), inner.parameters(), strict=True)
            yield at_most(f"resumed, saved '{name}'", max(distance(*pair) for pair in pairs), CLOSE)
        plain = _gpt(1)
        plain.load_state_dict(model.state_dict())
        plain.to(here.device)
        given = on(batches[0], here.device)
        model.eval()
        with torch.no_grad():
            mine, theirs = model(**given)["logits"], plain.eval()(**given)["logits"]
        yield at_most("its state in eager PyTorch", distance(mine, theirs), CLOSE)


def _undeploy(here: Here) -> Iterator[Result]:
    with variables():
        pair = Pair(_gpt(), adamw, here.device)
        worst = worst_of(pair, _texts(2))
        for batch in _texts(4)[2:]:
            pair.wrapped.undeploy()
            worst = max(worst, pair.step(batch))
        pair.wrapped.undeploy()
        pair.wrapped, wrapped = pair.inner, pair.wrapped
        worst = max(worst, pair.evaluate(_texts(5)[4]))
        pair.wrapped = wrapped
        yield at_most("undeployed between steps, and the model alone", worst, CLOSE)


def _launched(here: Here) -> Iterator[Result]:
    """A single rank has a process group: NCCL's, on a GPU."""
    (ended,) = run(here, 1, "_gpu/shared_rank.py", "one", limit_s=120, RANNC_TRANSPORT="auto")
    found = re.findall(r"worst (\S+) in (.*)", ended.output)
    yield at_most("with a process group of its own", float(found[-1][0]) if found else float("nan"), CLOSE)
    if not found:
        yield Result("its output", False, ended.tail())


def _tests(here: Here) -> Iterator[Result]:
    """What only a GPU shows; elsewhere these tests are skipped."""
    files = [str(file) for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text("utf-8")]
    # What other packages of the machine warn about is told in the output, and is no failure.
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu"]
    try:
        done = subprocess.run(
            [*command, *sorted(files)], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, check=False, timeout=TESTS_S,
        )  # fmt: skip
        output, right = done.stdout, done.returncode == 0
    except subprocess.TimeoutExpired as exc:
        output, right = (exc.stdout or b"") + f"\nno end after {TESTS_S} s".encode(), False
    lines = output.decode(errors="replace").strip().splitlines() or ["no output"]
    print("\n".join(lines), file=sys.stderr, flush=True)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    ran = counts.get("skipped" if here.small else "passed", 0)
    errors = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))] if not right else []
    yield Result("pytest -m gpu", right and ran > 0, lines[-1], note=" / ".join(errors)[:2000])
