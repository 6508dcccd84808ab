"""From a traced model to a deployment: ask the daemon, and only on a miss profile and plan.

The one place that knows the order.

Rank 0 talks to its node's daemon and decides; the deployment goes to all ranks as bytes, an error as its text.
One rank of every other node hands the result to its own node's daemon.
"""

from __future__ import annotations

import functools
import hashlib
import math
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import torch
from torch import nn

import rannd.errors
from rannd import log
from rannd.config import Config
from rannd.daemon.client import Client, Lease
from rannd.daemon.keys import Key, deployment_key, limit_key, link_key, profile_key
from rannd.daemon.version import version
from rannd.errors import DeploymentError, DoesNotFitError, RanndError
from rannd.graph.model import ModelGraph
from rannd.graph.opaque import preserved
from rannd.graph.structure import block_hashes
from rannd.plan.blocks import Block, make_blocks
from rannd.plan.deployment import Deployment, Slot, decode, encode
from rannd.plan.options import PlanOptions
from rannd.plan.places import lost_cut_points
from rannd.plan.search import assignment_lines, estimate_lines, plan
from rannd.profile.blocks import block_parts, measure_missing
from rannd.profile.costs import BlockCost, CostTable, LinkCost
from rannd.profile.links import copy_speed, measure_links
from rannd.profile.measure import Sample
from rannd.runtime.bound import planned_stages
from rannd.runtime.cache import GIB, Cache
from rannd.runtime.fit import lower_limit, short
from rannd.runtime.memory import Promise, amount
from rannd.runtime.world import World, device_memory, device_model

LEASE_WAIT_S = 1200.0
"""Longest wait for another job that makes the same deployment; it ends at once when that job dies.

The other ranks wait meanwhile, and give up after the 30 minutes of their groups.
"""


class Planner:
    """What is needed to find the deployment of one graph. All methods that say so are collective."""

    def __init__(
        self,
        world: World,
        config: Config,
        cache: Cache,
        graph: ModelGraph,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        leaves: Sequence[torch.Tensor],
        rows: Sequence[int],
    ) -> None:
        self._world = world
        self._config = config
        self._cache = cache
        self._graph = graph
        self._model = model
        self._leaves = leaves
        self._rows = tuple(rows)
        self._optimizer = (
            "none" if optimizer is None else f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        )
        self._options = PlanOptions.of(config)
        memory = min(memory for (memory,) in world.gather_numbers([device_memory(world)]))
        limit = min(memory, int(config.mem_limit_gb * GIB)) if config.mem_limit_gb else memory
        self.usable_memory = int(limit * (1 - config.mem_margin))
        self._model_name = device_model(world)
        self._used: Key | None = None
        self._base: Key | None = None
        self._backend = "nccl" if world.device.type == "cuda" else "gloo"
        self._versions = {"python": platform.python_version(), "torch": torch.__version__, "rannd": version()}
        self._versions["rannd source"] = source_digest()

    # -- the order --------------------------------------------------------------------------------------------

    def deployment(self, file: Path | None) -> Deployment:
        """The deployment from a file, the cache, or a plan made now. Collective."""
        if file is not None:
            data = self._everywhere(lambda: self._read(file))
            log.get("RaNNCModule").info("Using the deployment in %s", file)
            deployment = self._checked(data)
            lacking = short(self._world, self._model, deployment)
            if lacking is not None and self._world.rank == 0:
                log.get("RaNNCModule").warning("The deployment in %s is used although %s", file, _lacks(*lacking))
            return deployment
        self._base = self._key()
        deployment = self._below(self._known_limit(self._base)) or self._found_or_made()
        lacking = short(self._world, self._model, deployment)
        return deployment if lacking is None else self._smaller(deployment, *lacking)

    def promise(self, deployment: Deployment) -> Promise:
        """What the deployment promises, for the time when memory runs out."""
        return Promise(
            deployment=deployment,
            device=self._world.device,
            usable=self.usable_memory,
            config=self._config,
            cache=self._cache,
            key=self._used,
            base=self._base,
            marks_here=self._is_first_on_node(),
        )

    def _found_or_made(self) -> Deployment:
        key = self._used = self._key()
        client = self._cache.client
        found, lease = self._ask(client, key)
        if found:
            deployment = self._checked(found)
            self._tell_hit(deployment, key)
            return deployment
        try:
            data = self._make(client)
            if client is not None:
                client.put(key, data)
        finally:
            if lease is not None:
                lease.release()
        self._give_to_other_nodes(key, data)
        return self._checked(data)

    def dry_run(self, devices: int) -> Deployment:
        """A plan for so many devices of this kind that need not be there. Collective."""
        return decode(self._make(self._cache.client, devices))

    # -- memory -----------------------------------------------------------------------------------------------

    def _known_limit(self, base: Key) -> int:
        """What an earlier run that ran out of memory left for the next one, 0 for nothing. Collective."""
        data = b""
        if self._cache.client is not None:
            data = self._cache.client.get(limit_key(base)) or b""
        data = self._world.broadcast_bytes(data)
        return msgspec.msgpack.decode(data, type=int) if data else 0

    def _below(self, limit: int) -> Deployment | None:
        """A deployment for a lower limit, None where there is none, or no limit. Collective."""
        if not 0 < limit < self.usable_memory:
            return None
        first = self._world.rank == 0
        logger = log.get("RaNNCModule")
        if first:
            logger.warning(
                "An earlier run of this job ran out of memory: planning for %s of each device, not %s (rannc-cache "
                "clear forgets it)",
                amount(limit),
                amount(self.usable_memory),
            )
        before, self.usable_memory = self.usable_memory, limit
        try:
            return self._found_or_made()
        except DoesNotFitError as exc:
            if first:
                logger.warning("Planning as before, memory may run out again: %s", exc)
            self.usable_memory = before
            return None

    def _smaller(self, deployment: Deployment, rank: int, need: int, there: int) -> Deployment:
        """A deployment for the memory that is free; the one there is, where none fits. Collective."""
        before, used = self.usable_memory, self._used
        limit = lower_limit(there, self._config.mem_margin)
        what = _lacks(rank, need, there)
        if self._world.rank == 0:
            log.get("RaNNCModule").warning("Planning again for %s of each device: %s", amount(limit), what)
        self.usable_memory = limit
        try:
            return self._found_or_made()
        except DoesNotFitError as exc:
            if self._world.rank == 0:
                log.get("RaNNCModule").warning("No plan fits what is free, the first one is used: %s. %s", what, exc)
            self.usable_memory, self._used = before, used
            return deployment

    def _is_first_on_node(self) -> bool:
        """Whether this rank talks to its node's daemon: rank 0 does, and the first rank of each other node."""
        nodes = [slot.node for slot in self._world.slots]
        mine = self._world.slots[self._world.slot].node
        home = self._world.slots[self._world.rank_of_slot.index(0)].node
        return self._world.rank == 0 or (mine != home and nodes.index(mine) == self._world.slot)

    # -- parts ------------------------------------------------------------------------------------------------

    def _key(self) -> Key:
        rows = sum(self._rows)
        inputs = [
            (spec.name, str(spec.dtype), (rows, *spec.shape) if spec.batch else spec.shape)
            for spec in self._graph.signature.tensors
        ]
        return deployment_key(
            graph_hash=self._graph.task.graph_hash,
            inputs=inputs,
            global_batch=rows,
            world_size=self._world.size,
            topology=[(slot.node, slot.device) for slot in self._world.slots],
            device_model=self._model_name,
            device_memory=self.usable_memory,
            backend=self._backend,
            versions=self._versions,
            plan_items=self._config.plan_items(),
            optimizer=self._optimizer,
        )

    def _ask(self, client: Client | None, key: Key) -> tuple[bytes, Lease | None]:
        """(the deployment on all ranks or nothing, the right to make it on rank 0)."""
        found: bytes = b""
        lease: Lease | None = None
        if client is not None:
            answer = client.lease(key, LEASE_WAIT_S, log.get("RaNNCModule").info)
            if isinstance(answer, bytes):
                try:
                    self._checked(answer)
                    found = answer
                except DeploymentError as exc:
                    client.discard(key, str(exc))
                    log.get("RaNNCModule").warning("The cached deployment cannot be used: %s", exc)
            elif isinstance(answer, Lease):
                lease = answer
        return self._world.broadcast_bytes(found), lease

    def _checked(self, data: bytes) -> Deployment:
        deployment = decode(data)
        if deployment.graph_hash != self._graph.task.graph_hash:
            raise DeploymentError(
                f"the deployment was made for the graph {deployment.graph_hash[:12]}, this model's is "
                f"{self._graph.task.graph_hash[:12]}; plan again without it"
            )
        if len(deployment.slots) != self._world.size:
            raise DeploymentError(
                f"the deployment was made for {len(deployment.slots)} ranks, this job has "
                f"{self._world.size}; plan again without it"
            )
        planned_stages(self._graph, deployment)
        return deployment

    def _read(self, file: Path) -> bytes:
        try:
            return file.read_bytes()
        except OSError as exc:
            raise DeploymentError(
                f"the deployment {file} cannot be read: {exc.strerror}; name a file that save_deployment wrote"
            ) from exc

    def _make(self, client: Client | None, devices: int | None = None) -> bytes:
        """Profile and plan. Collective."""
        logger = log.get("RaNNCModule")
        first = self._world.rank == 0
        if first:
            logger.info("Running profiler ...")
        blocks = make_blocks(self._graph.task, self._options, world=devices or self._world.size)
        lost = lost_cut_points(self._graph.task)
        if lost and first:
            logger.warning(
                "%d of the model's CutPoints cannot be used: operators before and after them share memory that is "
                "written into, or belong together",
                lost,
            )
        costs = self._costs(client, blocks)
        if first:
            logger.info("Profiling finished")
            logger.info("Assuming batch size: %d", sum(self._rows))
        return self._everywhere(lambda: self._plan(blocks, costs, devices))

    def _plan(self, blocks: Sequence[Block], costs: CostTable, devices: int | None) -> bytes:
        logger = log.get("Decomposer")
        logger.info("Decomposer: %s", self._config.decomposer)
        logger.info("Available device memory: %d", self.usable_memory)
        logger.info("Starting model partitioning ...")
        slots = self._world.slots if devices is None else tuple(Slot(0, device) for device in range(devices))
        rows = sum(self._rows) if devices is None else math.ceil(sum(self._rows) / self._world.size) * devices
        deployment = plan(
            self._graph.task,
            blocks,
            costs,
            world=len(slots),
            slots=slots,
            batch_rows=rows,
            memory_bytes=self.usable_memory,
            options=self._options,
        )
        log.get("DPStaging").info("\n".join(estimate_lines(deployment)))
        ranks = self._world.rank_of_slot if devices is None else range(devices)
        for line in assignment_lines(deployment, ranks):
            logger.info(" %s", line)
        return encode(deployment)

    def _everywhere(self, make: Callable[[], bytes]) -> bytes:
        """What rank 0 makes, on all ranks; its error is raised on all of them."""
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

    def _costs(self, client: Client | None, blocks: Sequence[Block]) -> CostTable:
        parts = block_parts(self._graph, [block.ops for block in blocks])
        hashes = block_hashes(self._graph.task, [block.ops for block in blocks])
        rows = self._profile_rows()
        keys = {each: self._profile_key(each, rows) for each in dict.fromkeys(hashes)}
        known: dict[str, BlockCost] = {}
        if client is not None:
            for each, value in zip(keys, client.get_many(list(keys.values())), strict=True):
                if value is not None:
                    known[each] = msgspec.msgpack.decode(value, type=BlockCost)
        known = msgspec.msgpack.decode(
            self._world.broadcast_bytes(msgspec.msgpack.encode(known)), type=dict[str, BlockCost]
        )
        measured = measure_missing(
            parts,
            hashes,
            known,
            self._sample(),
            rows,
            rank=self._world.rank,
            world=self._world.size,
            gather=self._world.gather_bytes,
        )
        if client is not None and measured:
            client.put_many((keys[each], msgspec.msgpack.encode(cost)) for each, cost in measured.items())
        costs = {**known, **measured}
        return CostTable(tuple(costs[each] for each in hashes), self._links(client))

    def _profile_key(self, block: str, rows: Sequence[int]) -> Key:
        threads = torch.get_num_threads() if self._world.device.type == "cpu" else 0
        return profile_key(
            block_hash=block, device_model=self._model_name, threads=threads, versions=self._versions, rows=rows
        )

    def _profile_rows(self) -> tuple[int, ...]:
        """Rows to measure with: a rank's mini-batch, and a quarter of it where it may be sliced."""
        most = max(math.ceil(sum(self._rows) / self._world.size), 1)
        fewest = max(most // 4, 1)
        return (most,) if self._graph.coupled or fewest == most else (fewest, most)

    def _sample(self) -> Sample:
        specs = self._graph.signature.tensors
        arguments = {
            node: (leaf, spec.batch)
            for node, leaf, spec in zip(self._graph.traced.placeholders, self._leaves, specs, strict=False)
        }
        state: dict[str, torch.Tensor] = {**self._graph.traced.constants}
        for name, tensor in [*self._model.named_buffers(), *self._model.named_parameters()]:
            state[name] = tensor
        around = functools.partial(preserved, self._model) if self._graph.traced.leaf_paths else nullcontext
        return Sample(arguments, frozenset(self._graph.placement.requires_grad), state, self._world.device, around)

    def _links(self, client: Client | None) -> LinkCost:
        if self._world.size == 1:
            return copy_speed(self._world.device)
        key = link_key(
            topology=[(slot.node, slot.device) for slot in self._world.slots],
            device_model=self._model_name,
            backend=self._backend,
            versions=self._versions,
        )
        data = b""
        if client is not None:
            data = client.get(key) or b""
        data = self._world.broadcast_bytes(data)
        if data:
            return msgspec.msgpack.decode(data, type=LinkCost)
        assert self._world.forward is not None
        link = measure_links(self._world.forward, self._world.device)
        if client is not None:
            client.put(key, msgspec.msgpack.encode(link))
        return link

    def _give_to_other_nodes(self, key: Key, data: bytes) -> None:
        """The first rank of each node that rank 0 is not on keeps the deployment there, too."""
        if self._world.rank != 0 and self._is_first_on_node():
            with self._cache.connect() as client:
                client.put(key, data)

    def _tell_hit(self, deployment: Deployment, key: Key) -> None:
        if self._world.rank == 0:
            logger = log.get("RaNNCModule")
            logger.info("Using deployment %s from the cache", key.short)
            for stage in deployment.stages:
                ranks = ",".join(str(self._world.rank_of_slot[slot]) for slot in stage.slots)
                logger.info(" Subgraph %s runs on rank[%s]", stage.name, ranks)


def _lacks(rank: int, need: int, there: int) -> str:
    return f"rank {rank}'s stage needs {amount(need)}, and {amount(there)} are free or hold the model"


@functools.cache
def source_digest() -> str:
    """Digest of the code that decides what a plan is: another one may give other plans under the same version."""
    home = Path(rannd.errors.__file__).parent
    digest = hashlib.sha256()
    for room in ("graph", "profile", "plan"):
        for file in sorted((home / room).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def save(deployment: Deployment, file: Path) -> None:
    """Write a deployment to a file, whole or not at all."""
    file = file.expanduser().absolute()
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as temporary:
            temporary.write(encode(deployment))
        Path(temporary.name).replace(file)
    except OSError as exc:
        raise DeploymentError(
            f"the deployment cannot be written to {file}: {exc.strerror}; name a file in a folder that is there"
        ) from exc
