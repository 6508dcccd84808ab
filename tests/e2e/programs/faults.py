"""Plants faults into the running ranks, one a step, and tells what the step auditor says of each, as JSON.

Two stages of two replicas, two microbatches: pieces 0 to 7, of rank 0 1 2 3 0 1 2 3. The stages end at a CutPoint.

usage: faults.py WAY [FAULT ..]    no names: all faults

WAY is "plain" (doubles), "autocast" (to bfloat16), "scaled" (autocast to float16 with a GradScaler), "outside"
(autocast to bfloat16, and the script computes the loss), "shared" (`gather_inputs=False`), or "shared outside".
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from yardstick import RANK

import pyrannc
from rannd.errors import AuditError
from rannd.plan.schedule.program import ActionKind
from rannd.runtime.execution import inputs, stage
from rannd.runtime.execution.executor import Executor
from rannd.runtime.execution.global_sums import Totals
from rannd.runtime.execution.inputs import MiniBatch
from rannd.runtime.execution.program_player import ProgramPlayer
from rannd.runtime.execution.shared_batch import Share
from rannd.runtime.execution.stage import Computing
from rannd.runtime.execution.step import Step
from rannd.runtime.gradients import reducer
from rannd.runtime.gradients.reducer import Reducer

SECOND = (1, 3)
"""The ranks of the second stage."""
FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {}


def fault(make: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[..., Any]:
    """Add a fault by its name: a context in which it is there."""
    FAULTS[make.__name__] = make
    return make


@contextlib.contextmanager
def instead(owner: Any, name: str, other: Callable[..., Any]) -> Iterator[None]:
    """For as long as it is entered, `other` runs in place of a function, and gets it as its first argument."""
    original = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        return other(original, *args, **kwargs)

    with mock.patch.object(owner, name, called):
        yield


class Model(nn.Module):
    """Embedding and a head with its weights, dropout, a connection past the cut, and a buffer in the second stage."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.cut = pyrannc.CutPoint()
        self.second = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 8))
        self.register_buffer("weights", torch.ones(8))

    def forward(self, text: Tensor, shift: Tensor, target: Tensor | None = None) -> Any:
        start = self.embedding(text) + shift[:, None]
        values = self.cut(start + self.first(start))
        self.weights.mul_(0.9)
        logits = (values + self.second(values) * self.weights + start) @ self.embedding.weight.t()
        return logits if target is None else (loss_of(logits, target), logits)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all tokens but padding."""
    return cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0)


@fault
def swapped_microbatches() -> contextlib.AbstractContextManager[Any]:
    def give(original: Any, self: MiniBatch, step: Step, readers: Any) -> None:
        readers = list(readers)
        original(self, step, readers)
        if RANK == 0:
            for node, reader in readers:
                one, other = (0, node, reader), (4, node, reader)
                step.values[one], step.values[other] = step.values[other], step.values[one]

    return instead(MiniBatch, "give", give)


@fault
def wrong_loss_weight() -> contextlib.AbstractContextManager[Any]:
    def weights(original: Any, *args: Any, **kwargs: Any) -> Any:
        return tuple(each * (1.5 if RANK == 1 else 1.0) for each in original(*args, **kwargs))

    return instead(inputs, "pieces_weights", weights)


def _arriving(kind: ActionKind, piece: int, change: Callable[[Tensor], Tensor]) -> Any:
    """What arrives for a microbatch in a stage is changed."""

    def receive(original: Any, self: ProgramPlayer, step: Step, exchange: Any, action: Any) -> None:
        if action.kind is kind and action.piece == piece and 0 <= action.src < action.dst < 2:
            take = exchange.take

            def taken(asked: Any) -> Any:
                values, buffer = take(asked)
                changed = {n: change(v) if v.is_floating_point() else v for n, v in values.items()}
                return changed, buffer

            with mock.patch.object(exchange, "take", taken):
                original(self, step, exchange, action)
        else:
            original(self, step, exchange, action)

    return instead(ProgramPlayer, "_receive", receive)


@fault
def wrong_route() -> contextlib.AbstractContextManager[Any]:
    kept: dict[Any, Tensor] = {}

    def receive(original: Any, self: ProgramPlayer, step: Step, exchange: Any, action: Any) -> None:
        original(self, step, exchange, action)
        if action.kind is ActionKind.RECV_VALUES and action.dst == 1 and action.src == 0:
            for (piece, node, reader), value in list(step.values.items()):
                if reader == 1 and piece == action.piece:
                    if piece == 5 and node in kept:
                        step.values[piece, node, reader] = kept[node]
                    kept[node] = value.clone()

    return instead(ProgramPlayer, "_receive", receive)


@fault
def one_element() -> contextlib.AbstractContextManager[Any]:
    def change(value: Tensor) -> Tensor:
        changed = value.clone()
        changed.view(-1)[0] += 1e-9
        return changed

    return _arriving(ActionKind.RECV_VALUES, 6, change)


@fault
def rounded_on_the_way() -> contextlib.AbstractContextManager[Any]:
    return _arriving(ActionKind.RECV_VALUES, 1, lambda value: value.bfloat16().to(value.dtype))


@fault
def scaled_gradient() -> contextlib.AbstractContextManager[Any]:
    return _arriving(ActionKind.RECV_GRADS, 2, lambda value: value * 2)


@fault
def gradient_of_nothing() -> contextlib.AbstractContextManager[Any]:
    return _arriving(ActionKind.RECV_GRADS, 7, torch.zeros_like)


@fault
def reversed_rows() -> contextlib.AbstractContextManager[Any]:
    return _arriving(ActionKind.RECV_GRADS, 4, lambda value: value.flip(0))


@fault
def gradient_counted_twice() -> contextlib.AbstractContextManager[Any]:
    def add(original: Any, self: Step, piece: int, node: Any, gradient: Tensor) -> None:
        original(self, piece, node, gradient)
        if piece == 3 and node.op != "placeholder":
            original(self, piece, node, gradient)

    return instead(Step, "add", add)


@fault
def missed_reduction() -> contextlib.AbstractContextManager[Any]:
    class Done(dist.Work):
        def is_completed(self) -> bool:
            return True

        def wait(self, timeout: Any = None) -> bool:
            return True

    return instead(reducer.dist, "all_reduce", lambda *_, **__: Done())


@fault
def wrong_scale() -> contextlib.AbstractContextManager[Any]:
    return instead(Executor, "_seed", lambda original, *args: original(*args) * 2)


@fault
def stale_buffer() -> contextlib.AbstractContextManager[Any]:
    return instead(Computing, "agree_on_buffers", lambda *_: None)


@fault
def buffer_written_twice() -> contextlib.AbstractContextManager[Any]:
    def agree_on_buffers(original: Any, self: Computing, step: Step) -> None:
        original(self, step)
        for buffer in self.written().values():
            buffer.mul_(0.9)

    return instead(Computing, "agree_on_buffers", agree_on_buffers)


@fault
def lost_tie() -> contextlib.AbstractContextManager[Any]:
    """Each stage keeps its own gradient of the tied weight."""
    kept: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        def start(original: Any, self: Reducer, bucket: Any) -> None:
            for name in bucket.active:
                kept[name] = self._parameters.aliases[name].grad.clone()
            original(self, bucket)

        def finished(original: Any, self: Reducer, bucket: Any) -> Any:
            found = original(self, bucket)
            return {name: kept[name] if name == "embedding.weight" else each for name, each in found.items()}

        with instead(Reducer, "_start", start), instead(Reducer, "_finished", finished):
            yield

    return planted()


@fault
def tie_apart() -> contextlib.AbstractContextManager[Any]:
    """One rank's copy of a weight has gone another way."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        weight = model.embedding.weight
        factor = 2.0 if RANK == 2 else 1.0
        weight.data.mul_(factor)
        try:
            yield
        finally:
            weight.data.div_(factor)

    return planted()


@fault
def stale_parameter() -> contextlib.AbstractContextManager[Any]:
    """A stage computes with a copy that has missed an update."""

    def resolve(original: Any, self: Computing) -> None:
        original(self)
        names = self._stage.segments[0].part.tensors
        if "second.3.weight" in names and RANK == 3:
            place = names.index("second.3.weight")
            self._tensors[0][place] = nn.Parameter(self._tensors[0][place].detach() * 1.01)

    return instead(Computing, "resolve", resolve)


@fault
def other_random_numbers() -> contextlib.AbstractContextManager[Any]:
    def seed(original: Any, base: int, call: int, piece: int, number: int) -> int:
        return int(original(base, call, piece + (piece == 3 and number == 1), number))

    return instead(stage, "piece_seed", seed)


@fault
def outputs_out_of_order() -> contextlib.AbstractContextManager[Any]:
    def outputs(original: Any, self: Executor, step: Step) -> list[Any]:
        found: list[Any] = original(self, step)
        return [*found[:-1], found[-1].flip(0)] if RANK == 1 else found

    return instead(Executor, "_outputs", outputs)


@fault
def loss_without_a_piece() -> contextlib.AbstractContextManager[Any]:
    def take(original: Any, self: Totals, step: Step, piece: int) -> None:
        sums = dict(step.sums)
        original(self, step, piece)
        if piece == 6:
            step.sums.clear()
            step.sums.update(sums)

    return instead(Totals, "take", take)


@fault
def wrong_factor() -> contextlib.AbstractContextManager[Any]:
    def accept(original: Any, self: Reducer, gathered: Any, factor: Any, *, keep: bool) -> None:
        original(self, gathered, factor * 2, keep=keep)

    return instead(Reducer, "accept", accept)


@fault
def accumulated_twice() -> contextlib.AbstractContextManager[Any]:
    def start(original: Any, self: Reducer, bucket: Any) -> None:
        if "first.0.weight" in bucket.active and RANK == 2:
            self._parameters.aliases["first.0.weight"].grad.mul_(2)
        original(self, bucket)

    return instead(Reducer, "_start", start)


@fault
def not_delivered() -> contextlib.AbstractContextManager[Any]:
    def deliver(original: Any, self: Reducer, asked: Any = None) -> None:
        self._ready.pop("second.0.bias", None)
        original(self, asked)

    return instead(Reducer, "deliver", deliver)


@fault
def wrong_input_gradient() -> contextlib.AbstractContextManager[Any]:
    def gradients(original: Any, self: MiniBatch, *args: Any) -> list[Any]:
        found = original(self, *args)
        return [None if each is None else each * (3 if RANK == 2 else 1) for each in found]

    return instead(MiniBatch, "input_gradients", gradients)


@fault
def rows_of_another_rank() -> contextlib.AbstractContextManager[Any]:
    """Of a mini-batch that all ranks share."""

    def given(original: Any, self: Share, tensors: Any) -> list[Tensor]:
        found: list[Tensor] = original(self, tensors)
        return [each.roll(1, 0) for each in found] if RANK == 3 else found

    return instead(Share, "inputs", given)


def step(number: int) -> None:
    """Forward and backward of one step."""
    rows = 15 if shared else 4
    drawn = torch.Generator().manual_seed(10 * number + RANK)
    text, target = torch.randint(0, 11, (2, rows, 5), generator=drawn)
    shift = torch.randn(rows, 8, generator=drawn, dtype=dtype).requires_grad_()
    optimizer.zero_grad()
    half = {"autocast": torch.bfloat16, "outside": torch.bfloat16, "scaled": torch.float16}.get(way)
    with torch.autocast("cpu", half) if half is not None else contextlib.nullcontext():
        loss = loss_of(model(text, shift), target) if "outside" in way else model(text, shift, target)[0]
    (scaler.scale(loss) if scaler is not None else loss / 2).backward()


def update() -> None:
    """Update of the parameters."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


way, *wanted = sys.argv[1:]
shared = "shared" in way
dtype = torch.float64 if shared or way == "plain" else torch.float32  # autocast leaves doubles alone
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if way == "scaled" else None
torch.manual_seed(0)
inner = Model().to(dtype)
optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
model = pyrannc.RaNNCModule(inner, optimizer, gather_inputs=not shared, scaler=scaler)
step(0)
update()
audits = model._session.audits
told: dict[str, str] = {}
chosen = {name: plant for name, plant in FAULTS.items() if name in wanted or not wanted}
for number, (name, plant) in enumerate([("none", contextlib.nullcontext), *chosen.items()]):
    weights = model.weights.clone() if RANK in SECOND else None
    state = torch.get_rng_state()
    audits.wanted = audits.steps + 1
    try:
        with plant():
            step(number)
        told[name] = ""
    except AuditError as difference:
        told[name] = str(difference)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        if weights is not None:  # what a fault has left of it
            model.weights.copy_(weights)
step(99)
update()
if RANK == 0:
    print(f"faults: {json.dumps(told)}", flush=True)
