"""Provides the deployment of a traced model: looks it up in the cache, and only on a miss profiles and plans.

Rank 0 queries its node's daemon and plans; it broadcasts the encoded deployment, or the error, to all ranks. One rank
of each other node stores the deployment in its own node's cache.
"""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

import rannd.errors
from rannd import log
from rannd.config.cluster import Cluster, load_cluster
from rannd.daemon.client.cache import Lease
from rannd.daemon.common.keys import Key, deployment_key, limit_key, measured_key
from rannd.daemon.common.versions import version
from rannd.device.identity import device_model, is_accelerator
from rannd.device.memory import device_memory
from rannd.errors import CutError, DeploymentError, DoesNotFitError, RanndError
from rannd.graph.model import ModelGraph
from rannd.plan.blocks.blocks import Block, make_blocks
from rannd.plan.blocks.repeated_layers import parts_of
from rannd.plan.compatibility import check_belongs, differences, plain
from rannd.plan.deployment import (
    OFFLOAD,
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_PARAMS,
    Deployment,
    Provenance,
    Slot,
    decode,
    encode,
)
from rannd.plan.memory.replayed_memory import replayed
from rannd.plan.plan_lines import alternative_lines, assignment_lines, estimate_lines
from rannd.plan.plan_options import AUTO
from rannd.plan.plan_text import plan_line
from rannd.plan.search.planner import plan
from rannd.plan.simulate.plan_records import with_records
from rannd.profile.analytic import analytic_costs
from rannd.profile.costs import CostTable, LinkCost
from rannd.profile.graph_profile import FORMAT as PROFILE_FORMAT
from rannd.profile.graph_profile import GraphProfile
from rannd.ranks import rank_notes
from rannd.runtime.binding.planned_cut import check_planned_cut, planned_stages
from rannd.runtime.comm.cache_client import GIB, holder, tell_miss, understood
from rannd.runtime.comm.context import Context
from rannd.runtime.costs.profile_file import ProfileFile
from rannd.runtime.costs.profiler import Measuring, Platform
from rannd.runtime.planning.calibration_of_job import Calibration, LearnedKeys
from rannd.runtime.planning.deployment_file import named, read_file
from rannd.runtime.planning.job_flags import job_flags, words
from rannd.runtime.planning.job_options import job_options
from rannd.runtime.planning.memory_fit import lower_limit, short
from rannd.runtime.planning.memory_promise import MemoryPromise
from rannd.runtime.planning.plan_ahead import Better, Request, Wanted, next_slots
from rannd.runtime.planning.plan_ahead import start as start_planning
from rannd.runtime.planning.replanning import Replanning
from rannd.runtime.planning.tensor_memory import memory_for_tensors
from rannd.sources import PLANNING, digest_of
from rannd.units import amount

LEASE_WAIT_S = 1200.0
"""Maximum seconds to wait for another job that is making the same deployment; the wait ends if that job dies.

It has to be less than the 30 minutes after which the other ranks' process groups time out.
"""

_LIMIT = msgspec.msgpack.Decoder(int)
_OFFLOADED = (
    ("offload_optimizer", "the optimizer's state", "The optimizer's state is", OFFLOAD),
    ("offload_params", "parameters", "Parameters are", OFFLOAD_PARAMS),
    ("offload_activations", "activations", "Activations are", OFFLOAD_ACTIVATIONS),
)
"""What may be offloaded: its item, what messages call it, and what of a plan its reason is about."""


@dataclass(frozen=True)
class Target:
    """Devices, batch size and memory to plan for."""

    slots: tuple[Slot, ...]
    rows: int
    """Rows of the global batch."""
    memory: int
    """Bytes of each device that may be used."""
    made: Provenance
    cluster: Cluster | None = None
    """Cluster description to compute costs from; None: they are measured."""


class Planner:
    """Finds or makes the deployment of one graph."""

    def __init__(
        self,
        context: Context,
        graph: ModelGraph,
        leaves: Sequence[torch.Tensor],
        rows: Sequence[int],
    ) -> None:
        """`leaves`: this rank's tensor arguments; `rows`: number of rows of each rank."""
        self._context = context
        self._world = world = context.world
        self._config = config = context.config
        self._graph = graph
        self._parts = parts_of(graph.task, compiled=config.compile_stages != "off")
        self._rows = tuple(rows)
        optimizer, scaled = context.optimizer, context.options.scaled
        self._optimizer = (
            "none" if optimizer is None else f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
        self._options = job_options(context)
        self._interleaved = (
            config.interleave_loss and graph.sole_loss is not None and (scaled or not graph.signature.mode.float16)
        )
        """Whether backward runs inside the forward call."""
        self._memory = memory_for_tensors(world, convolutions=any("conv" in op.target for op in graph.task.ops))
        self.usable_memory = self._usable()
        self._doing: Callable[[str], None] = _no_progress
        """Reports progress to jobs that wait for this job's plan."""
        self._source = ""
        """Where the plan is from, in the log: '', ' from the cache', ' from a file'."""
        self._used: Key | None = None
        self._base: Key | None = None
        versions = {"python": platform.python_version(), "torch": torch.__version__, "rannd": version()}
        versions["rannd source"] = digest_of(PLANNING)[:16]
        flags = job_flags(world)
        self._platform = Platform(device_model(world.device), world.transport.backend, versions, flags)
        self._flags = words(flags)
        self._file = ProfileFile(config, self._platform.device_model, self._flags)
        self._made = Provenance(self._platform.device_model, "measured", version(), str(torch.__version__))
        self._measuring = Measuring(
            context,
            graph,
            leaves,
            rows,
            measured=self._parts.atoms if config.profile_by_acc else self._parts.grains,
            platform=self._platform,
        )

    # -- the order --------------------------------------------------------------------------------------------

    def deployment(self, file: Path | None, better: Better | None) -> Deployment:
        """Deployment from a file, the one that measured steps found, from the cache, or newly planned. Collective."""
        if file is not None:
            deployment = self._from_file(file)
            self._source = f" from {file}"
            self._tell(deployment)
            return deployment
        self._measuring.given = self._file.load(self._everywhere)
        self._base = self._key()
        deployment = (
            (self._accepted(better) if better is not None else None)
            or self._within_limit(self._known_limit(self._base))
            or self._found_or_made()
        )
        lacking = short(self._world, self._context.model, deployment)
        if lacking is not None:
            deployment = self._replan_for_free_memory(deployment, *lacking)
        self._tell(deployment)
        self._plan_ahead()
        if self._config.save_graph_profile and not self._measuring.profile:  # a cached deployment needed no profile
            self._measuring.costs(self._blocks(len(self._world.slots)))
        self._save_profile()
        return deployment

    def _plan_ahead(self) -> None:
        """Let a process of low priority plan for the hosts that an elastic job may have next. Collective.

        A deployment from the cache needed no costs of links; plans for other hosts do.
        """
        config = self._config
        wanted = rank_notes.heard() and config.cache == "on"  # else a next start would not look for them
        if not self._world.broadcast_bytes(bytes([wanted]))[0]:
            return
        links = self._measuring.measured_links()
        if self._world.rank:
            return
        ahead = next_slots(self._world.slots)
        sets = [Wanted(self._key(each, self._usable_of(each)), each, self._usable_of(each)) for each in ahead]
        start_planning(self._request(links, sets))

    def _request(self, links: tuple[LinkCost, LinkCost | None], wanted: Iterable[Wanted]) -> Request:
        """What a process has to know to make plans, on rank 0."""
        config, measuring = self._config, self._measuring
        return Request(
            self._graph.task,
            config.compile_stages != "off",
            config.profile_by_acc,
            self._measuring.parts.toolchain,
            self._measuring.profile,
            self._platform.device_model,
            self._measuring.threads,
            {name: str(each) for name, each in self._platform.versions.items()},  # torch's is a class of its own
            dict(self._platform.flags),
            links,
            measuring.learned(),
            measuring.learned_runtime(),
            measuring.queued,
            self._options,
            self._interleaved,
            sum(self._rows),
            self._made,
            _titled(self._context.model),
            config.daemon_timeout_s,
            config.daemon_idle_s,
            int(config.cache_max_gb * GIB),
            tuple(wanted),
        )

    def calibration(self, deployment: Deployment, replanning: Replanning) -> Calibration:
        """What learns from the steps of a deployment. Collective, while the cache is connected."""
        request: Request | None = None
        given = self._measuring.given  # times from a file, which stay what they are
        # Looking for NaN in all blocks, or comparing what is recomputed, is no part of other jobs' steps.
        usual = self._config.check_nan != "all" and not self._config.verify_recomp
        usable = self._world.rank == 0 and self._config.cache == "on" and given is None and usual
        key = self._used if usable and self._config.calibrate_after else None
        learns = self._world.broadcast_bytes(bytes([key is not None]))[0]
        links = self._measuring.measured_links() if learns else None  # the cache may have lost them, but not the plan
        if key is not None and links is not None:
            own = Wanted(key, self._world.slots, self.usable_memory, deployment)
            request = self._request(links, [own])
        keys = LearnedKeys(self._measuring.learned_key(), self._measuring.runtime_key())
        return Calibration(self._world, self._context.cache, deployment, request, keys, replanning)

    def _usable_of(self, slots: Sequence[Slot]) -> int:
        """Bytes that a plan may use of each of these devices, which are like this job's."""
        if self._world.nodes == 1 and not is_accelerator(self._world.device):
            return self._usable(device_memory(self._world.device, len(slots)))
        return self.usable_memory

    def links(self) -> tuple[LinkCost, LinkCost | None] | None:
        """Costs of links within a node and between nodes, if a timeline is to be predicted with them. Collective.

        What steps say of them is only known to rank 0, which predicts it.
        """
        if not self._world.broadcast_bytes(bytes([bool(self._config.event_trace_file)]))[0]:
            return None
        return self._measuring.learned_runtime().links(*self._measuring.measured_links())

    def profile(self) -> GraphProfile:
        """Measure the blocks of plans for any number of devices, unless already known. Collective."""
        self._measuring.given = self._file.load(self._everywhere)
        fewest = max(self._options.min_partition_num, self._options.partition_num)
        most = max(self._options.max_partition_num, fewest)
        # Plans for fewer devices have the blocks of the first of these, plans for more devices those of the last.
        plans = (self._blocks(devices) for devices in range(fewest, most + 1))
        if self._world.rank == 0:
            log.get("RaNNCModule").log(log.DETAIL, "Running profiler ...")
        self._measuring.measure_all(plans)
        if self._world.rank == 0:
            log.get("RaNNCModule").log(log.DETAIL, "Profiling finished")
        self._save_profile()
        return self._profile()

    def _save_profile(self) -> None:
        """Write measurements to graph_profile_file if save_graph_profile is set. Collective."""
        if self._config.save_graph_profile:
            self._file.save(self._profile(), self._everywhere)

    def _profile(self) -> GraphProfile:
        """All known measurements of this graph's blocks."""
        return GraphProfile(
            PROFILE_FORMAT,
            self._platform.device_model,
            version(),
            str(torch.__version__),
            self._flags,
            self._measuring.profile,
        )

    def _from_file(self, file: Path) -> Deployment:
        """Load a deployment from a file; warns about differences from what it was planned for. Collective."""
        logger = log.get("RaNNCModule")
        data = self._everywhere(lambda: read_file(file))
        with named(file):
            deployment = self._runnable(data)
        other = differences(deployment, here=self._made, slots=self._world.slots, rows=sum(self._rows))
        lacking = short(self._world, self._context.model, deployment)
        if lacking is not None:
            other.append(_shortage(*lacking))
        for (item, what, *_), offloads in zip(_OFFLOADED, deployment.offloads, strict=True):
            asked = getattr(self._config, item)
            if asked != AUTO and (asked == "true") != offloads:
                does = "offloads" if offloads else "does not offload"
                other.append(f"it {does} {what} ({item}={asked})")
        for each in other if self._world.rank == 0 else ():
            logger.warning("The deployment in %s is used although %s", file, each)
        return deployment

    def _accepted(self, better: Better) -> Deployment | None:
        """The plan that measured steps found; None, with a warning, if it is not for the graph that was traced now."""
        try:
            deployment = self._checked(better.deployment)
        except DeploymentError as exc:  # on all ranks
            if self._world.rank == 0:
                log.get("RaNNCModule").warning("The better plan cannot be used: %s", exc)
            return None
        self._used, self.usable_memory, self._source = better.key, better.memory, " after measured steps"
        return deployment

    def promise(self, deployment: Deployment) -> MemoryPromise:
        """Memory estimate of the deployment, for the error message if memory runs out."""
        return MemoryPromise(
            self._world,
            self._config,
            self._context.cache,
            deployment,
            self.usable_memory,
            key=self._used,
            base=self._base,
        )

    def _found_or_made(self) -> Deployment:
        begun = time.perf_counter()
        key = self._used = self._key()
        client = self._context.cache.client
        found, lease = self._look_up(key)
        if found:
            if lease is not None:  # found in another node's cache
                lease.release()
            deployment = self._checked(found)
            self._source = f" from the cache ({key.short})"
            if self._world.rank == 0:
                took_ms = 1e3 * (time.perf_counter() - begun)
                log.get("RaNNCModule").debug("Plan %s was found in %.1f ms", key.short, took_ms)
            return deployment
        if client is not None:
            tell_miss(client, key)
        if lease is not None:
            self._doing = lease.progress
            self._measuring.tell = lambda part: self._doing(f"profiling, {part:.0%}")
        self._source = ""
        try:
            data = self._make()
            if client is not None:
                client.put(key, data)
                client.discard(measured_key(key.digest), "it is of another plan")
        finally:
            self._doing, self._measuring.tell = _no_progress, None
            if lease is not None:
                lease.release()
        return self._checked(data)

    def dry_run(self, devices: int, cluster: str) -> Deployment:
        """Plan for `devices` devices that need not exist, of this job's kind or of a described cluster. Collective."""
        rows = math.ceil(sum(self._rows) / self._world.size) * devices
        if not cluster:
            self._measuring.given = self._file.load(self._everywhere)
            slots = tuple(Slot(0, device) for device in range(devices))
            data = self._make(Target(slots, rows, self._usable(), self._made))
            self._save_profile()
            return decode(data)
        there = load_cluster(cluster)
        slots = tuple(Slot(*place) for place in there.places(devices))
        made = msgspec.structs.replace(self._made, device=there.device, costs=f"cluster {there.name}")
        return decode(self._make(Target(slots, rows, self._usable(there.memory_bytes), made, there)))

    # -- memory -----------------------------------------------------------------------------------------------

    def _usable(self, memory: int = 0) -> int:
        """Bytes that a plan may use of a device with `memory` bytes; 0: of the job's smallest device."""
        memory = memory or self._memory
        limit = min(memory, int(self._config.mem_limit_gb * GIB)) if self._config.mem_limit_gb else memory
        return int(limit * (1 - self._config.mem_margin))

    def _known_limit(self, base: Key) -> int:
        """Memory limit left by an earlier run that ran out of memory, 0 if there is none. Collective."""
        limit = 0
        client = self._context.cache.client
        if client is not None:
            key = limit_key(base)
            limit = understood(client, key, client.get(key), _LIMIT) or 0
        return msgspec.msgpack.decode(self._world.broadcast_bytes(msgspec.msgpack.encode(limit)), type=int)

    def _within_limit(self, limit: int) -> Deployment | None:
        """Deployment for a lower memory limit; None if no plan fits, or `limit` is not lower. Collective."""
        if not 0 < limit < self.usable_memory:
            return None
        first = self._world.rank == 0
        logger = log.get("RaNNCModule")
        if first:
            logger.warning(
                "An earlier run of this job ran out of memory: planning for %s of each device instead of %s "
                "(rannc-cache clear removes this limit)",
                amount(limit),
                amount(self.usable_memory),
            )
        before, self.usable_memory = self.usable_memory, limit
        try:
            return self._found_or_made()
        except DoesNotFitError as exc:
            if first:
                logger.warning("Planning without this limit, so memory may run out again: %s", exc)
            self.usable_memory = before
            return None

    def _replan_for_free_memory(self, deployment: Deployment, rank: int, need: int, there: int) -> Deployment:
        """Plan again for the memory that is free; returns `deployment` if no plan fits. Collective."""
        before, used, source = self.usable_memory, self._used, self._source
        self._measuring.repeats = False  # it takes memory
        limit = lower_limit(there, self._config.mem_margin)
        what = _shortage(rank, need, there)
        if self._world.rank == 0:
            log.get("RaNNCModule").warning("Planning again for %s of each device: %s", amount(limit), what)
        self.usable_memory = limit
        try:
            return self._found_or_made()
        except DoesNotFitError as exc:
            if self._world.rank == 0:
                log.get("RaNNCModule").warning("No plan fits the free memory; using the first plan: %s. %s", what, exc)
            self.usable_memory, self._used, self._source = before, used, source
            return deployment

    # -- parts ------------------------------------------------------------------------------------------------

    def _key(self, slots: Sequence[Slot] = (), memory: int = 0) -> Key:
        """Key of the deployment for these slots with so much memory, by default those of this job."""
        rows, slots = sum(self._rows), slots or self._world.slots
        inputs = [
            (spec.name, str(spec.dtype), (rows, *spec.shape) if spec.batch else spec.shape)
            for spec in self._graph.signature.tensors
        ]
        return deployment_key(
            graph_hash=self._graph.task.graph_hash,
            inputs=inputs,
            global_batch=rows,
            world_size=len(slots),
            topology=[(slot.node, slot.device) for slot in slots],
            device_model=self._platform.device_model,
            device_memory=memory or self.usable_memory,
            backend=self._platform.backend,
            versions=self._platform.versions,
            flags=self._platform.flags,
            plan_items={
                **self._config.plan_items(),
                "zero_stage": self._options.zero_stage,
                "offload_optimizer": self._options.offload_optimizer,
                "offload_params": self._options.offload_params,
                "interleaved": self._interleaved,
                "graph_profile": self._file.digest,
            },
            optimizer=self._optimizer,
        )

    def _look_up(self, key: Key) -> tuple[bytes, Lease | None]:
        """Look up a deployment: returns it on all ranks (b"" if missing), and rank 0's lease for making it."""
        client = self._context.cache.client
        found: bytes = b""
        lease: Lease | None = None
        if client is not None:
            answer = client.lease(key, LEASE_WAIT_S, log.get("RaNNCModule").info, who=holder())
            if isinstance(answer, bytes):
                try:
                    self._check_cut(self._checked(answer))
                    found = answer
                except DeploymentError as exc:
                    client.discard(key, str(exc))
                    log.get("RaNNCModule").warning("The cached deployment cannot be used: %s", exc)
            elif isinstance(answer, Lease):
                lease = answer
        found = self._world.broadcast_bytes(found)
        return (found, lease) if found else (self._from_other_nodes(key), lease)

    def _from_other_nodes(self, key: Key) -> bytes:
        """Look up a deployment in the other nodes' caches; b"" if there is none. Collective."""
        cache = self._context.cache
        found = cache.elsewhere(key)
        if found:
            try:
                self._check_cut(self._checked(found))
            except DeploymentError as exc:
                log.get("RaNNCModule").warning("The deployment from another node's cache cannot be used: %s", exc)
                cache.discard(key, str(exc))
                return b""
            cache.accept(key, found)
        return found

    def _checked(self, data: bytes) -> Deployment:
        """Decode a deployment that this job's key stands for; DeploymentError if it cannot be that."""
        deployment = self._runnable(data)
        rows = sum(self._rows)
        if deployment.batch_rows != rows:
            raise DeploymentError(f"it is for a global batch of {deployment.batch_rows} rows, its key for {rows}")
        return deployment

    def _runnable(self, data: bytes) -> Deployment:
        """Decode a deployment; DeploymentError if this job cannot run it."""
        deployment = decode(data)
        check_belongs(deployment, graph_hash=self._graph.task.graph_hash, world=self._world.size, rows=sum(self._rows))
        planned_stages(self._graph, deployment)
        return deployment

    def _check_cut(self, deployment: Deployment) -> None:
        """DeploymentError if the graph cannot be cut as the deployment says, which no planner has made then."""
        try:
            check_planned_cut(self._graph, deployment)
        except CutError as exc:
            raise DeploymentError(str(exc)) from exc

    def _make(self, target: Target | None = None) -> bytes:
        """Profile and plan for `target`, by default this job; returns the encoded deployment. Collective."""
        logger = log.get("RaNNCModule")
        first = self._world.rank == 0
        target = target or Target(self._world.slots, sum(self._rows), self.usable_memory, self._made)
        if first and target.cluster is None:
            logger.log(log.DETAIL, "Running profiler ...")
        blocks = self._blocks(len(target.slots))
        lost = self._parts.lost_cut_points
        if lost and first:
            logger.warning(
                "%d of the model's CutPoints cannot be used: the operators before and after them share memory that is "
                "written in place, or cannot be separated",
                lost,
            )
        costs = self._analytic(blocks, target) if target.cluster is not None else self._measuring.costs(blocks)
        if first:
            logger.log(
                log.DETAIL,
                "Profiling finished" if target.cluster is None else f"Using the costs of {target.made.costs}",
            )
            logger.log(log.DETAIL, "Assuming batch size: %d", target.rows)
        self._doing("planning")
        with log.long_phase("RaNNCModule", "Planning", shown=first):
            return self._everywhere(lambda: self._plan(blocks, costs, target))

    def _blocks(self, devices: int) -> tuple[Block, ...]:
        return make_blocks(self._parts, self._options, world=devices)

    def _analytic(self, blocks: Sequence[Block], target: Target) -> CostTable:
        """Compute costs from the description of the target's cluster, for all possible sizes of microbatches."""
        assert target.cluster is not None
        most = max(math.ceil(target.rows / len(target.slots)), 1)
        pieces = 1 if self._graph.task.rows_coupled else self._options.pipeline_num or self._options.max_pipeline
        return analytic_costs(
            self._graph.task,
            [block.ops for block in blocks],
            target.cluster,
            fewest=math.ceil(most / pieces),
            most=most,
            nodes=len({slot.node for slot in target.slots}),
        )

    def _plan(self, blocks: Sequence[Block], costs: CostTable, target: Target) -> bytes:
        logger = log.get("Decomposer")
        logger.log(log.DETAIL, "Decomposer: %s", self._config.decomposer)
        logger.log(log.DETAIL, "Available device memory: %d", target.memory)
        logger.log(log.DETAIL, "Starting model partitioning ...")
        deployment = plan(
            self._graph.task,
            blocks,
            costs,
            world=len(target.slots),
            slots=target.slots,
            batch_rows=target.rows,
            memory_bytes=target.memory,
            options=self._options,
            interleaved=self._interleaved,
            ranked=True,
            coupled=self._graph.coupled or "",
        )
        deployment = replayed(
            self._graph.task, blocks, costs.blocks, deployment, self._options, interleaved=self._interleaved
        )
        deployment = with_records(self._graph.task, blocks, costs, deployment, self._options)
        deployment = msgspec.structs.replace(
            deployment,
            made=target.made,
            model=_titled(self._context.model),
            call_us=costs.runtime.call_us,
            host_us=costs.runtime.host_us,
        )
        log.get("DPStaging").log(log.DETAIL, "\n".join(estimate_lines(deployment)))
        here = target.slots == self._world.slots
        for line in assignment_lines(deployment, self._world.rank_of_slot if here else range(len(target.slots))):
            logger.log(log.DETAIL, " %s", line)
        for line in alternative_lines(deployment):
            logger.debug(" %s", line)
        return encode(deployment)

    def _everywhere(self, make: Callable[[], bytes]) -> bytes:
        """Call `make` on rank 0 and broadcast its result; an error is raised on all ranks."""
        told = b""
        error: RanndError | None = None
        if self._world.rank == 0:
            try:
                told = b"+" + make()
            except RanndError as exc:
                error = exc
                told = b"-" + msgspec.msgpack.encode((type(exc).__name__, str(exc)))
        told = self._world.broadcast_bytes(told)
        if error is not None:
            raise error
        if told[:1] == b"-":
            name, text = msgspec.msgpack.decode(told[1:], type=tuple[str, str])
            raise getattr(rannd.errors, name, RanndError)(text)
        return told[1:]

    def _tell(self, deployment: Deployment) -> None:
        """Log the plan that the job runs, on rank 0."""
        if self._world.rank == 0:
            line = plan_line(deployment, self._world.rank_of_slot)
            log.get("RaNNCModule").info("Plan%s: %s", self._source, line)
            why = {each.what: plain(each.why) for each in deployment.reasons}
            for (_, _, told, reason), offloads in zip(_OFFLOADED, deployment.offloads, strict=True):
                if offloads and reason in why:
                    log.get("RaNNCModule").info("%s offloaded: %s", told, why[reason])


def _titled(model: torch.nn.Module) -> str:
    """Class of a model and its number of parameters: ``GPT2LMHeadModel 11.1M``."""
    count = sum(parameter.numel() for parameter in model.parameters())
    unit, size = next(((unit, size) for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)) if count >= size), ("", 1))
    return f"{type(model).__name__} {count / size:.1f}{unit}" if unit else f"{type(model).__name__} {count}"


def _shortage(rank: int, need: int, there: int) -> str:
    return f"rank {rank}'s stage needs {amount(need)}, but only {amount(there)} are free or used by the model"


@functools.cache
def _no_progress(doing: str) -> None:
    """No-op progress callback."""
