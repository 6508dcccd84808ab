"""One real rank of a training run: wrapped by pyrannc, or by DistributedDataParallel as a check of the yardstick."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity.case import Case
from parity.record import Record, array, put_gradients, put_input_gradients, put_outputs
from parity.script import play
from parity.zoo import OPTIMIZERS, ZOO, build_batch, build_model
from rannd.device.reads import LateReads
from rannd.runtime.comm.world import made
from rannd.runtime.execution import stage
from rannd.runtime.parameters.state_elsewhere import TensorElsewhere
from rannd.runtime.transport.gloo_transport import GlooTransport
from rannd.runtime.transport.strict_transport import StrictTransport
from rannd.runtime.zero import mapped_file, sharded_step

Found = TypeVar("Found")


class Backend(Protocol):
    """What makes one process a rank among others."""

    rank: int
    local_loss: bool
    """A loss computed inside the model comes back as this rank's own, not as the global one."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module: ...
    def delay(self, model: nn.Module, on: bool) -> None: ...
    def allreduce(self, model: nn.Module) -> None: ...
    def own(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters whose values and gradients this rank holds."""
        ...

    def gradients(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The whole gradients of these parameters."""
        ...

    def values(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole values of these parameters."""
        ...

    def placing(self, case: Case) -> contextlib.AbstractContextManager[None]:
        """Plans are as the case wants them."""
        ...

    def plan(self, model: nn.Module, record: Record) -> None: ...
    def reset(self) -> None: ...
    def barrier(self) -> None: ...
    def close(self) -> None: ...


class Rannc:
    """Ranks under pyrannc."""

    local_loss = False

    def __init__(self) -> None:
        import pyrannc  # the yardstick must not need it

        self._pyrannc = pyrannc
        sharded_step.MOST = 4 << 10  # bytes: state that is elsewhere comes in several buckets
        stage.LEAST_OFFLOADED = mapped_file.LEAST_OFFLOADED = 1  # bytes
        self.rank = pyrannc.get_rank()
        self._strict: StrictTransport | None = None

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        wrapped: nn.Module = self._pyrannc.RaNNCModule(model, optimizer)
        return wrapped

    def delay(self, model: nn.Module, on: bool) -> None:
        self._pyrannc.delay_grad_allreduce(on)

    def allreduce(self, model: nn.Module) -> None:
        cast(Any, model).allreduce_grads()

    def own(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        return cast(Any, model).named_parameters(own=True)

    def gradients(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
        if cast(Any, model).deployment.zero < 2:
            yield from ((name, parameter.grad) for name, parameter in self.own(model))
            return
        yield from self._copied(model, cast(Any, model).get_param_grad)

    def values(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        if cast(Any, model).deployment.zero < 3:
            return self.own(model)
        return self._copied(model, cast(Any, model).get_param)

    def _copied(self, model: nn.Module, copy: Callable[[str], Found]) -> Iterator[tuple[str, Found]]:
        own = {name for name, _ in self.own(model)}
        for name, _ in cast(Any, model).named_parameters(from_global=True):
            found = copy(name)  # collective
            if name in own:
                yield name, found

    @contextlib.contextmanager
    def placing(self, case: Case) -> Iterator[None]:
        from parity.joining import JOINED, join_blocks  # the yardstick must not need it
        from parity.placing import place_plans
        from parity.recomputing import recompute_every_other

        with contextlib.ExitStack() as undone:
            if case.passes > 1:
                undone.callback(place_plans(case.schedule, case.passes, max(case.zero, 0)))
            if case.every_other:
                undone.callback(recompute_every_other())
            undone.callback(join_blocks(JOINED if case.joined else 0))
            yield

    def plan(self, model: nn.Module, record: Record) -> None:
        deployment = cast(Any, model).deployment
        record["plan/replicas"] = array(torch.tensor([len(stage.slots) for stage in deployment.stages]))
        record["plan/micro"] = array(torch.tensor(deployment.microbatches))
        settings = [set(stage.segments) for stage in deployment.stages]
        record["plan/recompute"] = array(
            torch.tensor([[again in each for again in (False, True)] for each in settings])
        )
        record["plan/offload"] = array(torch.tensor(deployment.offloads))

    @contextlib.contextmanager
    def strict(self) -> Iterator[None]:
        """Transfers follow NCCL's rules, and what is computed is looked at one step later, as on GPUs."""
        world = made()
        assert world is not None
        before, reads = world.transport, world.reads
        if self._strict is None:
            assert isinstance(before, GlooTransport)
            self._strict = StrictTransport(world.device, world.rank, *before.groups)
        world.transport, world.reads = self._strict, LateReads(world.device, late=self._strict.reads_late)
        try:
            yield
            world.reads.settle()
        finally:
            world.transport, world.reads = before, reads

    def reset(self) -> None:
        self._pyrannc.delay_grad_allreduce(False)
        self._pyrannc.clear()

    def barrier(self) -> None:
        self._pyrannc.barrier()

    def close(self) -> None:
        """Nothing: pyrannc leaves in order with the process."""


class Ddp:
    """Ranks under torch's DistributedDataParallel, on gloo."""

    local_loss = True

    def __init__(self, rendezvous: Path) -> None:
        self.rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        dist.init_process_group(
            "gloo",
            init_method=rendezvous.as_uri(),
            rank=self.rank,
            world_size=int(os.environ["OMPI_COMM_WORLD_SIZE"]),
        )

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    def delay(self, model: nn.Module, on: bool) -> None:
        cast(Any, model).require_backward_grad_sync = not on  # what its no_sync() does

    def allreduce(self, model: nn.Module) -> None:
        raise NotImplementedError("DistributedDataParallel reduces in backward only")

    def own(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        return model.named_parameters()

    def gradients(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
        return ((name, parameter.grad) for name, parameter in model.named_parameters())

    def values(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return model.named_parameters()

    def placing(self, case: Case) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def plan(self, model: nn.Module, record: Record) -> None:
        record["plan/replicas"] = array(torch.tensor([dist.get_world_size()]))
        record["plan/micro"] = array(torch.tensor(1))

    def reset(self) -> None:
        """Nothing outlives a wrapped model."""

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()


class Rank:
    """Plays a script on one real rank (`script.Trainer`)."""

    def __init__(self, case: Case, backend: Backend) -> None:
        self.case = case
        self.backend = backend
        self.entry = ZOO[case.model]
        model = build_model(case, backend.rank)
        # a tied parameter may be known under either name on a rank that holds one of its stages
        first: dict[int, str] = {}
        self._canonical = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        self.optimizer = OPTIMIZERS[case.optimizer](model)
        self.model = backend.wrap(model, self.optimizer)
        self.record: Record = {}
        self._waiting: list[tuple[str, Any, Tensor]] = []

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def forward(self, step: int, call: int) -> None:
        name = f"{step}/{call}"
        batch, rows = build_batch(self.case, step, call, self.backend.rank)
        output = self.model(*batch[0], **batch[1])
        put_outputs(self.record, f"{name}/out", output, without_scalars=self.entry.loss != "outside")
        objective = self._objective(output, rows, step, f"{name}/loss")
        self._waiting.append((name, batch, objective))

    def _objective(self, output: Any, rows: int, step: int, name: str) -> Tensor:
        objective = self.entry.objective(output, rows)
        seen = objective.detach().clone()
        if self.backend.local_loss and self.entry.loss != "outside":
            if self.entry.loss == "mean":
                objective = objective * (rows * self.case.ranks / self.case.total_rows(step))
            seen = objective.detach().clone()
            dist.all_reduce(seen)
            seen /= self.case.ranks
        self.record[name] = array(seen)
        return objective

    def backward(self, scale: float) -> None:
        total = self._waiting[0][2]
        for _, _, objective in self._waiting[1:]:
            total = total + objective
        (total if scale == 1.0 else total * scale).backward()
        for name, batch, _ in self._waiting:
            put_input_gradients(self.record, f"{name}/input", batch)
        self._waiting = []

    def delay(self, on: bool) -> None:
        self.backend.delay(self.model, on)

    def allreduce(self) -> None:
        self.backend.allreduce(self.model)

    def _named(self, found: Iterator[tuple[str, Found]]) -> dict[str, Found]:
        return {self._canonical[name.removeprefix("module.")]: each for name, each in found}

    def optimize(self, step: int) -> None:
        put_gradients(self.record, step, self._named(self.backend.gradients(self.model)))
        self.optimizer.step()

    def look(self, step: int, call: int, *, training: bool) -> None:
        name = f"{step}/{call}/{'probe' if training else 'eval'}"
        batch, rows = build_batch(self.case, step, call, self.backend.rank)
        self.model.train(training)
        with torch.no_grad():
            output = self.model(*batch[0], **batch[1])
        self.model.train()
        put_outputs(self.record, name, output, without_scalars=self.entry.loss != "outside")
        self._objective(output, rows, step, f"{name}loss")

    def decay(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def finish(self) -> None:
        """Write down what is left after the last step, and the plan that ran."""
        for name, parameter in self._named(self.backend.values(self.model)).items():
            self.record[f"end/param/{name}"] = array(parameter)
        for name, value in self.model.state_dict().items():
            if isinstance(value, TensorElsewhere):
                continue  # rank 0 alone has the values
            self.record[f"end/state/{name.removeprefix('module.')}"] = array(value)
        self.backend.plan(self.model, self.record)


def train(case: Case, backend: Backend) -> Record:
    """Runs a case on this rank; its plan comes from the case's variables."""
    variables = case.environment()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        rank = Rank(case, backend)
        with backend.placing(case):
            play(case, rank)
        rank.finish()
        backend.reset()
        return rank.record
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
