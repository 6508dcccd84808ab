"""Runs the calls of one wrapped model, and what is done between them.

A call has three steps: `_prepare_call` finds the graph that all ranks run (or traces one), `_run_call` runs this rank's
stage, `_finish_call` returns the outputs to the script.

    guards ──► lockstep ──► executor ──► autograd bridge
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rannd import log
from rannd.device.host_copies import to_device
from rannd.device.reads import moved
from rannd.errors import StepError, UsageError
from rannd.graph.call.signature import Call, Mode
from rannd.plan.deployment import Deployment, decode
from rannd.profile.graph_profile import GraphProfile
from rannd.runtime.audit.step_audit import StepAudits
from rannd.runtime.calls.graph_binding import GraphBinding
from rannd.runtime.calls.graph_table import UNKNOWN, Graphs
from rannd.runtime.calls.loss_check import check_losses
from rannd.runtime.comm.context import Context
from rannd.runtime.comm.lockstep import Phase, agree, meet
from rannd.runtime.deployment.deployer import Deployed
from rannd.runtime.deployment.step_measuring import MeasuringSettings, Planned, StepMeasuring, is_planned
from rannd.runtime.deployment.undeploy import gather_gradient, gathered_states, undeploy
from rannd.runtime.execution.autograd_bridge import attach
from rannd.runtime.execution.executor import Executor
from rannd.runtime.execution.outputs import NotSent
from rannd.runtime.execution.shared_batch import Share, from_rank_0, rows_by_slot
from rannd.runtime.execution.step import Step
from rannd.runtime.gradients.scaling import Factor
from rannd.runtime.optim.global_optimizer import whole_optimizer
from rannd.runtime.optim.wide_loading import keep_wide_state
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.parameters.state_dict import gather_tensor
from rannd.runtime.planning.job_options import job_options
from rannd.runtime.planning.memory_fit import short_of_change
from rannd.runtime.planning.memory_promise import MemoryPromise
from rannd.runtime.planning.replanning import Replanning
from rannd.runtime.timeline.recorder import Doing


class Follower(Protocol):
    """Keeps values for each of the model's tensors where the tensors are."""

    swapped: bool
    """Whether the model has these values now, so that it cannot be undeployed."""

    def deployed(self) -> None:
        """Called when the model was deployed."""

    def undeploying(self, parameters: Parameters) -> None:
        """Called before the model is undeployed. Collective."""


@dataclass(frozen=True)
class AgreedCall:
    """What all ranks run for a call."""

    numbers: Sequence[int]
    """Of each rank's graph."""
    rows: Sequence[int]
    """Of each rank."""

    @property
    def alike(self) -> bool:
        """Whether all ranks run the same graph, and not one for the sizes of each."""
        return len(set(self.numbers)) == 1


@dataclass(frozen=True)
class ReadyCall:
    """A call that all ranks are ready to run."""

    call: Call
    deployed: Deployed
    executor: Executor
    step: Step
    share: Share | None
    """This rank's share of the mini-batch, if all ranks share rank 0's."""
    reduce: bool
    """Whether gradients of a backward inside the call are reduced at once, or accumulated with delayed ones."""


class Session:
    """Runs calls of a model. All methods are collective: all ranks make the same calls in the same order."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.world = world = context.world
        meet(world, Phase.WRAP)
        self.seed: int = int.from_bytes(world.broadcast_bytes(torch.initial_seed().to_bytes(8, "big")), "big")
        self.values = InitialValues(context)
        self._graphs = Graphs(context)
        self.audits = StepAudits(context)
        self._measures = MeasuringSettings.of(context)
        self._steps = 0
        self.followers: list[weakref.ref[Follower]] = []
        """What has values for each of the model's tensors; in the same order on all ranks."""
        self.between_steps: Callable[[], None] | None = None
        """What is done before a call, if a step was made since the last one. Collective."""
        self.settled = self.world.size == 1 and not self.values.bare
        """Whether the undeployed model has its values, the same on all ranks."""
        self.delivered = 0
        """How often gradients were reduced and given to the parameters."""
        self.dropout: bool | None = None
        """Value of `RaNNCModule.enable_dropout`; None: the modules' training flags decide."""
        if context.optimizer is not None:
            whole_optimizer(context.optimizer, world)
            if context.config.master_weights:
                keep_wide_state(context.optimizer, tells=world.rank == 0)
        self._measuring: StepMeasuring | None = None
        self._replanning = Replanning(context.config.replan, context.options.total_calls)
        self._binding = GraphBinding(context, self.values, self._graphs, self._replanning)
        self._open: list[weakref.ref[Step]] = []
        """Steps of training that may not have had their backward."""

    # -- calls ------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, delayed: Callable[[], bool]) -> Any:
        """Run one call and return its output for this rank's samples.

        `delayed()` returns whether the reduction of gradients is delayed, now and when backward runs.
        """
        recorder, binding = self._context.recorder, self._binding
        with self._context.subject.speaking():
            if self.between_steps is not None:
                self.between_steps()
            recorder.begin_step(self._steps)
            begun = recorder.begin_on_host()
            ready = binding.flattened(args, kwargs, lambda call: self._prepare_call(call, training, waits=delayed()))
            outputs = self._run_call(ready)
            found = self._finish_call(ready, outputs, delayed)
            recorder.end_on_host(Doing.CALL, begun)
            return found

    def _prepare_call(self, call: Call, training: bool, *, waits: bool) -> ReadyCall:
        """Find the graph that all ranks run for a call, and this rank's part of the mini-batch."""
        watch, shared = self.world.watch, self._context.options.shared
        watch.where.step, watch.promise = self._steps, self.promise
        if shared:
            meet(self.world, Phase.FORWARD)
            call = from_rank_0(self.world, call)
        mode = Mode.current(training, self.dropout)
        agreed = self._graph_of_all(call, mode, waits=waits)
        executor = self._executor(agreed)
        by_slot = self._rows_by_slot(executor, agreed.rows)
        deployed = self._deployed
        assert deployed is not None
        as_planned = agreed.alike and is_planned(executor.bound, sum(by_slot), deployed.deployment)
        if self._replanning.take(as_planned=as_planned):
            self._take_better_plan(deployed)
            agreed = self._graph_of_all(call, mode, waits=waits)
            executor, deployed = self._executor(agreed), self._deployed
            assert deployed is not None
        if not any(by_slot):
            raise StepError("the mini-batches of all ranks are empty; skip the step")
        deployed.begin_call(self._steps, float16=mode.float16)
        share = Share(self.world, executor.bound.graph, by_slot) if shared else None
        step = self._step(executor, call, by_slot, share)
        assert self._measuring is not None
        if agreed.alike:
            self._measuring.begin(executor.bound, sum(by_slot), inside=step.interleaved, waits=waits)
        self._steps += 1
        if mode.grad:
            self._open.append(weakref.ref(step))
        watch.where.stage = executor.bound.stages[0].number
        # Gradients that are already delayed are reduced together with those of this call, in its backward.
        reduce = not waits and not deployed.reducer.something_waits
        step.audit = self.audits.begin(executor.bound, deployed.parameters, step.number, self.seed, reduce=reduce)
        if step.audit is not None and not agreed.alike:
            step.audit.refuse("ranks pass different sizes")
            step.audit = None
        return ReadyCall(call, deployed, executor, step, share, reduce)

    def _run_call(self, ready: ReadyCall) -> list[Any]:
        """Run this rank's stage; returns the outputs of this rank's rows. Training stops at a NaN loss."""
        executor, step, reads = ready.executor, ready.step, self.world.reads
        reads.begin()
        outputs = executor.forward(step, reduce=ready.reduce)
        mode = executor.bound.graph.signature.mode
        if mode.training and mode.grad:
            model = type(self._context.model).__qualname__
            check_losses(self._context.finite, executor, step, outputs, ready.deployed.parameters, model)
        self.world.issued.note()
        reads.end()
        self.world.watch.ensure_intact()
        return outputs

    def _finish_call(self, ready: ReadyCall, outputs: list[Any], delayed: Callable[[], bool]) -> Any:
        """Convert outputs to what the model returns: on the device of the call's tensors, connected to autograd."""
        graph, tensors = ready.executor.bound.graph, ready.call.tensors
        if ready.share is not None:
            outputs = ready.share.outputs(outputs)
        home = ready.call.home
        outputs = [
            moved(value, home) if isinstance(value, torch.Tensor) and not isinstance(value, NotSent) else value
            for value in outputs
        ]
        if graph.signature.mode.grad:
            outputs = attach(ready.executor, ready.step, tensors, outputs, delayed, ready.share)
        return graph.traced.outputs.unflatten(outputs, ready.call.unread_values)

    def _take_better_plan(self, deployed: Deployed) -> None:
        """Undeploy the model, so that this call deploys it with the better plan; not if that is impossible."""
        better = self._replanning.on_all_ranks(self.world)
        lacking = short_of_change(self.world, deployed.deployment, decode(better.deployment))
        self._replanning.tell_taken(lacking)
        if lacking is None:
            try:
                self.undeploy()
                self._replanning.follow(better)
            except (StepError, UsageError) as exc:  # on all ranks, before anything has changed
                self._replanning.tell_failed(exc)

    def _executor(self, agreed: AgreedCall) -> Executor:
        return self._graphs.use([agreed.numbers[rank] for rank in self.world.rank_of_slot])

    def _rows_by_slot(self, executor: Executor, rows: Sequence[int]) -> tuple[int, ...]:
        """Rows of each slot in a call, for those of each rank."""
        by_slot = tuple(rows[rank] for rank in self.world.rank_of_slot)
        if not self._context.options.shared:
            return by_slot
        return rows_by_slot(self.world, executor.bound.graph, by_slot[0])

    # -- the parts of a call ----------------------------------------------------------------------------------

    def _graph_of_all(self, call: Call, mode: Mode, *, waits: bool) -> AgreedCall:
        """Agree on the graphs that ranks run; traces the call if a rank has no graph."""
        agreed = self._known_to_all(call, mode, waits=waits)
        if agreed is None and self._deployed is not None:
            self._deployed.frozen.agree()  # requires_grad may have changed only on the ranks that hold the parameters
            agreed = self._known_to_all(call, mode, waits=waits)
        if agreed is None:
            told = self._agree(self._bind(call, mode), call, mode, waits=waits)
            numbers = self._common(told) or [number for number, _ in told]
            agreed = AgreedCall(numbers, [rows for _, rows in told])
        return agreed

    def _known_to_all(self, call: Call, mode: Mode, *, waits: bool) -> AgreedCall | None:
        """As `_graph_of_all`, but None if some rank has no graph for the call."""
        stale = self._deployed is not None and self._deployed.frozen.changed()
        told = self._agree(UNKNOWN if stale else self._graphs.find(call, mode), call, mode, waits=waits)
        if any(number == UNKNOWN for number, _ in told):
            return None
        numbers = self._common(told)
        return None if numbers is None else AgreedCall(numbers, [rows for _, rows in told])

    def _common(self, told: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
        return self._graphs.common(told, sizes=not self._context.options.shared)

    def _agree(self, number: int, call: Call, mode: Mode, *, waits: bool) -> list[tuple[int, int]]:
        """All-gather (graph, rows) of every rank; StepError if gradients are delayed on some ranks only."""
        rows, replan = self._graphs.rows(number, call), self._replanning.told(self._steps, ready=self._is_between(mode))
        begun = self._context.recorder.begin_on_host()
        told = agree(self.world, Phase.FORWARD, self._steps, number, rows, int(waits), replan)
        self._context.recorder.end_on_host(Doing.AGREE, begun)
        self._replanning.heard([each[3] for each in told])
        if len({each[2] for each in told}) > 1:
            ranks = [rank for rank, each in enumerate(told) if each[2]]
            raise StepError(
                f"the reduction of gradients is delayed on ranks {ranks} (delay_grad_allreduce), but not on the "
                "others; switch the delay on and off on all ranks"
            )
        return [(number, rows) for number, rows, *_ in told]

    def _is_between(self, mode: Mode) -> bool:
        """Whether a call of this mode begins a step, and all earlier ones have had their backward."""
        steps = ((ref, ref()) for ref in self._open)
        self._open = [ref for ref, step in steps if step is not None and not step.finished]
        training = mode.training and mode.grad and self._deployed is not None
        swapped = any(each.swapped for ref in self.followers if (each := ref()) is not None)
        return training and not self._open and not self.something_waits and not swapped

    def _step(self, executor: Executor, call: Call, rows: tuple[int, ...], share: Share | None) -> Step:
        """Create the step of a call; `rows`: rows per slot."""
        leaves = to_device(call.tensors, self.world.device)
        step = Step(self._steps, executor.own.pieces(rows), leaves)
        if share is not None:
            step.leaves, step.whole = share.inputs(leaves), leaves
        step.interleaved, step.seed = self._interleaves(executor)
        return step

    def _interleaves(self, executor: Executor) -> tuple[bool, Factor]:
        """Whether backward runs inside the call, and the gradient of the loss that it starts from.

        In half precision this is the GradScaler's scale, because small gradients would underflow without it.
        """
        options, wanted = self._context.options, self._context.config.interleave_loss
        inside = executor.bound.runs_backward_inside(wanted=wanted, scaled=options.scaled)
        if not inside or options.scaler is None or not options.scaled:
            return inside, 1.0
        scale = options.scaler._get_scale_async() if self.world.reads.late else None
        return True, options.scaler.get_scale() if scale is None else scale.to(self.world.device, torch.float64)

    # -- a call without a graph -------------------------------------------------------------------------------

    def _bind(self, call: Call, mode: Mode) -> int:
        """Trace and bind a graph for a call that some rank has no graph for; returns its number."""
        watch = self.world.watch
        watch.where.preparing = True
        number = self._binding.bind(call, mode, self)
        watch.where.preparing, watch.promise = False, self.promise
        return number

    def made(self, deployed: Deployed) -> None:
        """Count the gradients of a new deployment, and measure its steps."""
        deployed.reducer.delivered.append(self._count)
        planned = Planned(deployed.deployment, deployed.links, job_options(self._context), deployed.promise.key)
        self._measuring = StepMeasuring(self._context, planned, self._measures)
        self._measuring.gathered.append(deployed.calibration.take)
        if self.world.rank == 0 and self._measures.after:
            self._replanning.await_steps(self._measures.after)

    def ready(self) -> None:
        """Tell followers of it, once its first graph is bound."""
        for each in self.followers:
            follower = each()
            if follower is not None:
                follower.deployed()

    def profile(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> GraphProfile:
        """Measure the blocks of a call's graph, for plans on any number of ranks; nothing is deployed."""
        mode = Mode.current(training, self.dropout)
        return self._binding.flattened(args, kwargs, lambda call: self._binding.profile(call, mode))

    # -- state ------------------------------------------------------------------------------------------------

    @property
    def _deployed(self) -> Deployed | None:
        return self._binding.deployed

    @property
    def deployment(self) -> Deployment | None:
        """Deployment; None before the first call."""
        return self._deployed.deployment if self._deployed is not None else None

    @property
    def parameters(self) -> Parameters | None:
        """Parameters and their owners; None before the first call."""
        return self._deployed.parameters if self._deployed is not None else None

    @property
    def promise(self) -> MemoryPromise | None:
        """Memory that the plan promised; None before the first call."""
        return self._deployed.promise if self._deployed is not None else None

    @property
    def measuring(self) -> StepMeasuring | None:
        """What measures the steps of the deployment; None before the first call."""
        return self._measuring

    @property
    def coupled(self) -> bool:
        """Whether results of samples of the deployed model depend on others, or on how many there are."""
        return self._deployed is not None and self._deployed.coupled

    @property
    def something_waits(self) -> bool:
        """Whether there are gradients that were not reduced yet."""
        return self._deployed is not None and self._deployed.reducer.something_waits

    def _count(self) -> None:
        self.delivered += 1

    @property
    def random_position(self) -> tuple[int, int]:
        """(seed, number of calls so far), which determine the random numbers of the model's operators."""
        return self.seed, self._steps

    def resume(self, seed: int, steps: int) -> None:
        """Continue with the random numbers of another run. Call it with equal arguments on all ranks."""
        self.seed, self._steps = seed, steps
        for executor in self._graphs.executors():
            for computing in executor.stages.values():
                computing.seed = seed

    # -- between calls ----------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Reduce delayed gradients."""
        if self._deployed is not None:
            meet(self.world, Phase.ALLREDUCE_GRADS)
            with self.world.watch.inside("reduction of gradients"):
                self._deployed.reducer.reduce()

    def ensure_reduced(self, before: str) -> None:
        """StepError if there are gradients that were not reduced yet, on all ranks alike."""
        if self.something_waits:
            raise StepError(
                "gradients were not reduced yet (delay_grad_allreduce(True)): call model.allreduce_grads(), or run a "
                f"backward with the delay off, before {before}"
            )

    def gradient(self, name: str) -> torch.Tensor | None:
        """Copy a parameter's reduced gradient to the CPU, by its first name.

        Collective, unless every rank holds the parameter and its whole gradient.
        """
        assert self._deployed is not None
        parameters = self._deployed.parameters
        if parameters.everywhere(name) and (parameters.shared is None or name not in parameters.shared):
            gradient = parameters.tensors[name].grad
            return None if gradient is None else gradient.detach().to_dense().to("cpu", copy=True)
        meet(self.world, Phase.GET_PARAM_GRAD, name)
        return gather_gradient(self.world, parameters, name)

    def forget_waiting(self) -> None:
        """Drop gradients that were not reduced yet."""
        if self._deployed is not None:
            self._deployed.reducer.forget()

    def undeploy(self) -> None:
        """Give every rank the whole model and optimizer back; the next call deploys it again. Collective."""
        deployed = self._deployed
        if deployed is None:
            return
        meet(self.world, Phase.UNDEPLOY)
        deployed.parameters.adopt()
        deployed.frozen.agree()
        states = gathered_states(self.world, deployed.parameters, self._context.optimizer)
        self._gather_followers(deployed.parameters)
        undeploy(self.world, deployed.parameters, deployed.origin, self._context.optimizer, states)
        self.settled = True
        self.close()
        if self.world.rank == 0:
            log.get("RaNNCModule").info("Every rank has the whole model again; the next call deploys it again")

    def _gather_followers(self, parameters: Parameters) -> None:
        """Tell followers of an undeployment; not those that are gone on some rank, as garbage is collected anytime."""
        here = [each() for each in self.followers]
        everywhere = zip(*self.world.gather_numbers([int(each is not None) for each in here]), strict=True)
        for follower, alive in zip(here, everywhere, strict=True):
            if follower is not None and all(alive):
                follower.undeploying(parameters)

    def gather(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        """Copy what its holder has for a tensor to the CPU of all ranks, by its first name. Collective."""
        assert self._deployed is not None
        return gather_tensor(self.world, self._deployed.parameters, name, everywhere=True, value=value)

    def alive(self) -> None:
        """No-op; raises in the object that replaces a session after `pyrannc.clear`."""

    def close(self) -> None:
        """Drop the deployment."""
        if self._measuring is not None:
            self._measuring.close()
            self._measuring = None
        self._binding.forget()
        self._context.subject.end()
