"""Deploys a model: plans, distributes its parameters over the ranks, and binds graphs to the deployment."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.fx import Node

from rannd import log
from rannd.device.identity import is_accelerator
from rannd.graph.call.call_errors import check_values
from rannd.graph.call.signature import Call
from rannd.graph.model import ModelGraph
from rannd.plan.deployment import Deployment
from rannd.plan.plan_text import show
from rannd.profile.costs import LinkCost
from rannd.profile.graph_profile import GraphProfile
from rannd.ranks import planned
from rannd.runtime.binding.bound_graph import bind
from rannd.runtime.binding.planned_cut import planned_stages, segment_owners, tensor_owners
from rannd.runtime.comm.context import Context
from rannd.runtime.deployment.bound_compiling import compile_bound
from rannd.runtime.deployment.connecting import connect
from rannd.runtime.deployment.undeploy import Origin
from rannd.runtime.execution.executor import Executor
from rannd.runtime.execution.p2p import MessageBuffers
from rannd.runtime.execution.played_graph import PlayedGraph
from rannd.runtime.gradients import grad_norm
from rannd.runtime.gradients.autograd_inputs import Anchor
from rannd.runtime.gradients.clip_watch import ClipWatch
from rannd.runtime.gradients.grad_overflow import Overflow
from rannd.runtime.gradients.reducer import Reducer
from rannd.runtime.gradients.requires_grad import Frozen
from rannd.runtime.gradients.sharded_gradients import ShardedGradients
from rannd.runtime.optim.global_optimizer import whole_optimizer
from rannd.runtime.optim.local_optimizer import WholeOptimizer
from rannd.runtime.optim.placeholder import placeholder_gradient
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.planning.calibration_of_job import Calibration
from rannd.runtime.planning.deployment_file import save_file
from rannd.runtime.planning.graph_dumps import dump
from rannd.runtime.planning.memory_promise import MemoryPromise
from rannd.runtime.planning.plan_provider import Planner
from rannd.runtime.planning.replanning import Replanning
from rannd.runtime.traces.trace_provider import placed
from rannd.runtime.zero.host_memory import HostMemory
from rannd.runtime.zero.mapped_file import MappedFile
from rannd.runtime.zero.replica_exchange import ReplicaExchange
from rannd.runtime.zero.sharded_parameters import ShardedParameters
from rannd.runtime.zero.state_home import StateHome


class DryRunDone(SystemExit):
    """Exits a script that was started for planning only (partitioning_dry_run_np)."""


@dataclass(frozen=True)
class Deployed:
    """A deployed model: its deployment, and the objects that exist until it is undeployed."""

    deployment: Deployment
    promise: MemoryPromise
    parameters: Parameters
    reducer: Reducer
    frozen: Frozen
    origin: Origin
    overflow: Overflow
    anchor: Anchor
    held: grad_norm.ClippedParameters
    clip_watch: ClipWatch | None
    whole: WholeOptimizer | None
    segment_owners: Mapping[str, tuple[int, ...]]
    """Segments that read each parameter and buffer, numbered through all stages."""
    coupled: bool
    """Whether results of samples depend on others, or on how many there are, in the graph that was planned."""
    links: tuple[LinkCost, LinkCost | None] | None
    """Costs of links within a node and between nodes; None: they are not known."""
    calibration: Calibration
    """Learns from its steps."""
    buffers: MessageBuffers
    """What messages arrive in."""
    missing: dict[str, frozenset[int]] = field(default_factory=dict)
    """Places of the outputs that are not sent to the ranks, by family of signatures: the first sizes decide."""

    def begin_call(self, number: int, *, float16: bool) -> None:
        """Prepare a call: take up changes that the script has made to parameters since the last one. Collective."""
        self.parameters.refresh()
        if self.whole is not None:
            self.whole.begin_call()
        if self.clip_watch is not None:
            self.clip_watch.compare(number)
        self.overflow.watched |= float16

    def close(self) -> None:
        """Unregister the model from gradient clipping, and stop watching its gradients."""
        grad_norm.leave(self.held)
        if self.clip_watch is not None:
            self.clip_watch.close()


class Deployer:
    """Deploys a model, and binds its graphs to the deployment. All methods are collective."""

    def __init__(self, context: Context, values: InitialValues) -> None:
        self._context = context
        self._world = context.world
        self._config = context.config
        self._values = values

    def deploy(self, graph: ModelGraph, call: Call, rows: Sequence[int], replanning: Replanning) -> Deployed:
        """Plan for `graph`, called with `rows` rows on each rank, and distribute the parameters.

        `replanning` is told of a better plan, and how long all but planning takes.

        Raises DryRunDone after planning, if only a plan was requested.
        """
        world, config = self._world, self._config
        for line in graph.idle_cuts if world.rank == 0 else ():
            log.get("RaNNCModule").warning("%s", line)
        planner = self._planner(graph, call, rows)
        if config.partitioning_dry_run_np:
            deployment = planner.dry_run(config.partitioning_dry_run_np, config.partitioning_dry_run_cluster)
            self._dump(graph, deployment, planned_stages(graph, deployment))
            if world.rank == 0:
                print(show(deployment), flush=True)
                if config.save_deployment:
                    save_file(deployment, Path(config.deployment_file))
            planned.tell()
            raise DryRunDone(0)
        check_values(call.names, call.tensors)
        deployment = planner.deployment(self._context.options.load_deployment, replanning.following())
        promise = planner.promise(deployment)
        world.watch.promises[promise.digest] = promise
        world.watch.stages = {
            rank: tuple(number for number, each in enumerate(deployment.stages) if slot in each.slots)
            for slot, rank in enumerate(world.rank_of_slot)
        }
        links, calibration = planner.links(), planner.calibration(deployment, replanning)
        begun = time.monotonic()
        with log.long_phase("ParamStorage", "Distributing the parameters", shown=world.rank == 0):
            deployed = self._distribute(graph, deployment, promise, links, calibration)
        replanning.moving_s = time.monotonic() - begun
        return deployed

    def profile(self, graph: ModelGraph, call: Call, rows: Sequence[int]) -> GraphProfile:
        """Measure the blocks of `graph`, for plans on any number of ranks."""
        check_values(call.names, call.tensors)
        return self._planner(graph, call, rows).profile()

    def _planner(self, graph: ModelGraph, call: Call, rows: Sequence[int]) -> Planner:
        leaves = [placed(tensor, self._world.device) if tensor.is_meta else tensor for tensor in call.tensors]
        return Planner(self._context, graph, leaves, rows)

    def _distribute(
        self,
        graph: ModelGraph,
        deployment: Deployment,
        promise: MemoryPromise,
        links: tuple[LinkCost, LinkCost | None] | None,
        calibration: Calibration,
    ) -> Deployed:
        """Distribute parameters, so that each rank holds those of its stage."""
        world, model, optimizer = self._world, self._context.model, self._context.optimizer
        owners = tensor_owners(graph, planned_stages(graph, deployment), deployment)
        segments = segment_owners(graph, deployment)
        self._values.prepare(lambda name: name in owners and name not in deployment.unused_params)
        if world.rank == 0:
            log.get("ParamStorage").log(log.DETAIL, "Synchronizing parameters ...")
        origin = Origin([*model.named_parameters(), *model.named_buffers()])
        if deployment.offload_params and self._values.bare:
            self._values.hold = self._held_values()
        parameters = Parameters(self._context, owners, deployment, self._values)
        clip_watch: ClipWatch | None = None
        whole: WholeOptimizer | None = None
        sharded: ShardedGradients | None = None
        if optimizer is not None:
            whole = whole_optimizer(optimizer, world)
            whole.keep_own(parameters)
            sharded = self._share(whole, parameters, deployment, segments)
            clip_watch = ClipWatch(world, parameters, deployment, optimizer)
        if deployment.offload_params:
            parameters.to_device()
        self._values.finish()
        several = len(deployment.stages) > 1 or deployment.zero >= 2  # ranks have different gradients
        overflow = Overflow(world, lambda: placeholder_gradient(optimizer))
        overflow.watched = any(p.dtype == torch.float16 for p in model.parameters()) or self._context.options.scaled
        reducer = Reducer(
            world,
            parameters,
            divisor=self._context.averaged,
            overlap=not self._config.sync_allreduce,
            consolidate=self._config.consolidate_grads,
            overflow=overflow if several else None,
            sharded=sharded,
            agrees=deployment.zero >= 2,
            recorder=self._context.recorder,
        )
        if clip_watch is not None:
            reducer.delivered.append(clip_watch.reduced)
        held = grad_norm.ClippedParameters(world, parameters, over_ranks=several)
        grad_norm.enter(held)
        frozen = Frozen(world, parameters)
        anchor = Anchor(parameters)
        return Deployed(
            deployment,
            promise,
            parameters,
            reducer,
            frozen,
            origin,
            overflow,
            anchor,
            held,
            clip_watch,
            whole,
            segments,
            graph.coupled is not None,
            links,
            calibration,
            MessageBuffers(world.transport),
        )

    def _held_values(self) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Where values of offloaded parameters are until they are divided: in files, for a GPU in the host's memory."""
        if is_accelerator(self._world.device):
            return lambda _, tensor: tensor
        return state_home(self._world.device, self._config.offload_dir).hold

    def _share(
        self,
        whole: WholeOptimizer,
        parameters: Parameters,
        deployment: Deployment,
        segments: Mapping[str, tuple[int, ...]],
    ) -> ShardedGradients | None:
        """Divide the optimizer's state, and gradients, among the replicas of each stage, if so planned (ZeRO).

        Half-precision parameters get master weights, and the state leaves the device's memory, if so planned.
        """
        world, config = self._world, self._config
        mine: tuple[int, ...] = (world.slot,)
        if deployment.zero:
            for stage in deployment.stages:
                if len(stage.slots) > 1:
                    world.group_of(stage.slots)  # on every rank in the same order
            mine = tuple(next(stage.slots for stage in deployment.stages if world.slot in stage.slots))
        home = state_home(world.device, config.offload_dir) if deployment.offload else None
        away = state_home(world.device, config.offload_dir) if deployment.offload_params else None
        if len(mine) == 1 and not config.master_weights and home is None and away is None:
            return None
        apart = segments if deployment.zero >= 2 else {}
        buckets = whole.share(parameters, mine, apart, masters=config.master_weights, home=home, alone=away is not None)
        parameters.refresh()  # master weights have float32 gradients
        if deployment.zero <= 1 or not buckets:
            return None
        exchange = ReplicaExchange(world, mine)
        if deployment.zero == 2:
            return ShardedGradients(parameters, buckets, exchange)
        values = ShardedParameters(parameters, buckets, exchange, away)
        for held, sharded in whole.shared:  # also those of other models
            if held is parameters:
                sharded.stepped.append(values.changed)
        return ShardedGradients(parameters, buckets, exchange, values)

    def bind(self, deployed: Deployed, graph: ModelGraph, seed: int, rows: Sequence[int]) -> Executor:
        """Bind a graph to the deployment and create its executor; random numbers depend on `seed`.

        `rows`: rows of each rank's mini-batch in calls of this graph, which its stages are compiled for.
        """
        planned = graph.task.graph_hash == deployed.deployment.graph_hash
        owners = None if planned else deployed.parameters.owners
        with log.long_phase("RaNNCModule", "Preparing the stages", shown=self._world.rank == 0):
            bound = bind(
                graph,
                deployed.deployment,
                self._world.slot,
                owners,
                None if planned else deployed.segment_owners,
                all_outputs=self._context.options.all_outputs,
                missing=deployed.missing.get(graph.signature.family()),
                compiled=self._config.compile_stages != "off",
            )
            if bound.interleaved is not None:
                kept_back = bound.interleaved.missing
                places = frozenset(place for place, node in enumerate(graph.traced.results) if node in kept_back)
                deployed.missing.setdefault(graph.signature.family(), places)
            bound = connect(self._world, bound)
        self._dump(graph, deployed.deployment, bound.stage_of)
        state = deployed.parameters.aliases
        values = None if deployed.reducer.sharded is None else deployed.reducer.sharded.values
        if values is not None and self._config.compile_stages != "off":
            (every,) = values.readers([{name for stage in bound.stages for name in stage.part.tensors}])
            values.enter(every)
        compiled = compile_bound(self._context, bound, state, rows)
        if values is not None:
            values.leave()
        home = None
        if deployed.deployment.offload_activations and graph.signature.mode.grad:
            home = state_home(self._world.device, self._config.offload_dir)
        played = PlayedGraph(self._context, bound, state, deployed.reducer.sharded, seed, compiled, home)
        graphs = [played] * self._world.size
        return Executor(self._context, graphs, deployed.reducer, deployed.anchor, deployed.buffers)

    def _dump(self, graph: ModelGraph, deployment: Deployment, stage_of: Mapping[Node, int]) -> None:
        if self._config.dump_graph and self._world.rank == 0:
            dump(self._config, graph, deployment, stage_of)


def state_home(device: torch.device, folder: str) -> StateHome:
    """Where a rank with this device has what is offloaded; `folder` as of `MappedFile`."""
    return HostMemory(device, pinned=True) if is_accelerator(device) else MappedFile(folder)
