"""Measures costs of blocks and links on the devices of this job, or takes them from the cache."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass

import msgspec
import torch
from torch.fx import Node

from rannd import log
from rannd.daemon.common.keys import Component, Key, learned_key, link_key, profile_key, runtime_key
from rannd.device.identity import is_accelerator
from rannd.graph.fx.ir import Size, TaskGraph
from rannd.graph.model import ModelGraph
from rannd.graph.partition.block_hash import crossing
from rannd.graph.partition.cut import Part
from rannd.graph.tracing.leaf_recorder import preserved
from rannd.plan.blocks.blocks import Block
from rannd.profile.block_costs import Ranks, block_part, given_in_stages, measure_missing
from rannd.profile.costs import CostTable, LinkCost
from rannd.profile.graph_profile import GraphProfile
from rannd.profile.links import copy_speed, measure_links
from rannd.profile.measure import ProfileInputs
from rannd.profile.points import Measured, is_plausible, lacking, ladder
from rannd.runtime.comm.cache_client import understood
from rannd.runtime.comm.context import Context
from rannd.runtime.compiling.measured_code import MeasuredCode
from rannd.runtime.costs.known_costs import MeasuredParts, Ops
from rannd.runtime.costs.learned_costs import LearnedCosts
from rannd.runtime.costs.learned_runtime import LearnedRuntime

_LINKS = msgspec.msgpack.Decoder(tuple[LinkCost, LinkCost | None])
_KNOWN_LINKS = msgspec.msgpack.Decoder(tuple[LinkCost, LinkCost | None] | None)
_MEASURED = msgspec.msgpack.Decoder(Measured)
_LEARNED = msgspec.msgpack.Decoder(LearnedCosts)
_RUNTIME = msgspec.msgpack.Decoder(LearnedRuntime)
_BOTH_LEARNED = msgspec.msgpack.Decoder(tuple[LearnedCosts, LearnedRuntime])


@dataclass(frozen=True)
class Platform:
    """Device, backend, versions and settings of torch that measured costs are valid for."""

    device_model: str
    backend: str
    versions: Mapping[str, str]
    flags: Mapping[str, Component]
    """See `job_flags`."""


def _touched(task: TaskGraph) -> Size:
    """Bytes that a step reads and writes: parameters and values with their gradients, and an optimizer's state."""
    return sum((value.bytes.scaled(2) for value in task.values), Size(4.0 * sum(param.bytes for param in task.params)))


class Measuring:
    """Measures the costs of one graph.

    Args:
        context: Context of the wrapped model.
        graph: The graph.
        leaves: This rank's tensor arguments.
        rows: Number of rows of each rank.
        measured: Sets of operators (grains or atoms) that are measured; their costs add up to those of blocks.
        platform: Part of the cache keys.
    """

    def __init__(
        self,
        context: Context,
        graph: ModelGraph,
        leaves: Sequence[torch.Tensor],
        rows: Sequence[int],
        *,
        measured: Sequence[Ops],
        platform: Platform,
    ) -> None:
        self._context = context
        self._world = world = context.world
        self._graph = graph
        self._leaves = leaves
        self._most = max(math.ceil(sum(rows) / world.size), 1)
        """Rows of the largest microbatch."""
        self._whole = bool(graph.coupled)
        """Whether mini-batches are not split into microbatches."""
        self._platform = platform
        self.queued = is_accelerator(world.device)
        """Whether the host works ahead of the device."""
        self.threads = torch.get_num_threads() if world.device.type == "cpu" else 0
        """Threads of a rank, on which times depend."""
        self.tell: Callable[[float], None] | None = None
        """Progress callback; its argument is the fraction of the measurements that is done."""
        self.given: GraphProfile | None = None
        """Measurements from a file, used in addition to those in the cache."""
        self.profile: dict[str, Measured] = {}
        """Known measurements of this graph's blocks, by hash."""
        self.repeats = True
        """Whether what is known, but noisy, is measured again."""
        self._measured_now: set[str] = set()
        """Those that this job has measured: what is noisy stays so for now."""
        self._compiled = None if context.config.compile_stages == "off" else MeasuredCode(context, graph)
        self.parts = MeasuredParts(graph.task, measured, "" if self._compiled is None else self._compiled.toolchain)
        self.links: tuple[LinkCost, LinkCost | None] | None = None
        """Costs of links within a node and between nodes, once they are known."""

    def costs(self, blocks: Sequence[Block]) -> CostTable:
        """Costs of all blocks and of the links, measured unless already known. Collective.

        They are corrected by what steps of earlier jobs took.
        """
        self._measure(self.parts.wanted([block.ops for block in blocks]), everything=False)
        data = self._world.broadcast_bytes(msgspec.msgpack.encode((self.learned(), self.learned_runtime())))
        learned, runtime = _BOTH_LEARNED.decode(data)
        correction = learned.correction(self.parts, self.profile)
        of_blocks = self.parts.costs(blocks, self.profile, self._most, correction)
        links, graph_hash = runtime.links(*self.measured_links()), self._graph.task.graph_hash
        return CostTable(of_blocks, *links, runtime.cost(graph_hash, correction.action_us, queued=self.queued))

    def learned(self) -> LearnedCosts:
        """What rank 0's cache has of the graph's stages; nothing on other ranks. Not collective."""
        client = self._context.cache.client
        if client is None:
            return LearnedCosts()
        key, ops = self.learned_key(), len(self._graph.task.ops)
        return (
            understood(client, key, client.get(key), _LEARNED, lambda found: found.is_plausible(ops)) or LearnedCosts()
        )

    def learned_key(self) -> Key:
        """Key of `learned`."""
        return learned_key(
            graph_hash=self._graph.task.graph_hash,
            device_model=self._platform.device_model,
            threads=self.threads,
            backend=self._platform.backend,
            versions=self._platform.versions,
            flags=self._platform.flags,
            code=self.parts.toolchain,
        )

    def learned_runtime(self) -> LearnedRuntime:
        """What rank 0's cache has of the runtime on these hosts; nothing on other ranks. Not collective."""
        client = self._context.cache.client
        if client is None:
            return LearnedRuntime()
        key = self.runtime_key()
        return understood(client, key, client.get(key), _RUNTIME, lambda found: found.is_plausible) or LearnedRuntime()

    def runtime_key(self) -> Key:
        """Key of `learned_runtime`."""
        nodes = Counter(slot.node for slot in self._world.slots)
        return runtime_key(
            device_model=self._platform.device_model,
            threads=self.threads,
            backend=self._platform.backend,
            ranks=max(nodes.values()),
            versions=self._platform.versions,
        )

    def measure_all(self, plans: Iterable[Sequence[Block]]) -> None:
        """Measure the blocks of several plans, at row counts that suffice for any smaller mini-batch. Collective."""
        wanted: dict[str, list[Ops]] = {}
        for blocks in plans:
            wanted |= self.parts.wanted([block.ops for block in blocks])
        self._measure(wanted, everything=True)

    def _measure(self, wanted: Mapping[str, Sequence[Ops]], *, everything: bool) -> None:
        """Complete `profile` by the measurements of `wanted` (operators of equal parts, by hash). Collective."""
        client = self._context.cache.client
        self.profile = msgspec.msgpack.decode(
            self._world.broadcast_bytes(msgspec.msgpack.encode(self._known(wanted))), type=dict[str, Measured]
        )
        missing = {
            each: self._lacking(
                self.profile.get(each),
                everything=everything,
                noisy=self.repeats and each not in self._measured_now,
            )
            for each in wanted
        }
        missing = {each: rows for each, rows in missing.items() if rows}
        log.get("GraphProfiler").debug("%d of %d different parts have to be measured", len(missing), len(wanted))
        values, sample = self._graph.task.values, self._sample()
        # Compiled blocks compute all that they read.
        shared: Set[Node] = frozenset() if self._compiled else given_in_stages(self._graph, self.parts.measured)

        def part_of(each: str) -> tuple[Part, list[str]]:
            ops = wanted[each][0]
            names = [values[value].name for value in crossing(self._graph.task, [ops])[0]]
            part = block_part(self._graph, ops, f"Block{ops[0]}", given=shared)
            if self._compiled is not None:  # before the clock runs
                self._compiled.prepare(part, missing[each], sample)
            return part, names

        measured = measure_missing(
            missing,
            part_of,
            sample,
            Ranks(
                local=len([rank for rank in self._world.ranks_here if rank < self._world.rank]),
                local_size=self._world.local_size,
                node=self._world.slots[self._world.slot].node,
                nodes=self._world.nodes,
                gather=self._world.gather_bytes,
                meet=self._world.meet_on_node,
            ),
            self.tell,
            often={each: len(wanted[each]) for each in missing},
        )
        joined = {each: found.joined(self.profile.get(each)) for each, found in measured.items()}
        self.profile.update(joined)
        self._measured_now.update(joined)
        given = self.given.blocks if self.given is not None else {}  # of another device, perhaps: not for the cache
        own = {each: found for each, found in joined.items() if each not in given}
        if client is not None and own:
            client.put_many(
                (self._profile_key(each), msgspec.msgpack.encode(found.lasting)) for each, found in own.items()
            )

    def _known(self, wanted: Iterable[str]) -> dict[str, Measured]:
        """What rank 0 knows of these parts, by hash, and what was measured before."""
        client = self._context.cache.client
        keys = {each: self._profile_key(each) for each in wanted if each not in self.profile}
        known = dict(self.profile)
        if self.given is not None:
            known.update((each, self.given.blocks[each].given) for each in keys if each in self.given.blocks)
        if client is not None:
            for (each, key), value in zip(keys.items(), client.get_many(list(keys.values())), strict=True):
                kept = understood(client, key, value, _MEASURED, is_plausible)
                if kept is not None:
                    known[each] = known[each].joined(kept) if each in known else kept
        return known

    def _lacking(self, known: Measured | None, *, everything: bool, noisy: bool) -> tuple[int, ...]:
        """Row counts to measure of a part; `noisy`: also those that may have been spoilt when they were measured."""
        spoilt = known.noisy(self._most) if known is not None and noisy else ()
        if not everything:
            return lacking(known, self._most, whole=self._whole) or spoilt
        there = {point.rows for point in known.points} if known is not None else set()
        steps = ladder(self._most, whole=self._whole)
        found = [rows for rows in steps if rows not in there and lacking(known, rows, whole=self._whole)]
        return tuple(sorted({*found, *spoilt}))

    def _profile_key(self, block: str) -> Key:
        return profile_key(
            block_hash=block,
            device_model=self._platform.device_model,
            threads=self.threads,
            versions=self._platform.versions,
            flags=self._platform.flags,
        )

    def _sample(self) -> ProfileInputs:
        specs = self._graph.signature.tensors
        arguments = {
            node: (leaf, spec.batch)
            for node, leaf, spec in zip(self._graph.traced.placeholders, self._leaves, specs, strict=False)
        }
        state: dict[str, torch.Tensor] = {**self._graph.traced.constants}
        for name, tensor in [*self._context.model.named_buffers(), *self._context.model.named_parameters()]:
            state[name] = tensor
        around = functools.partial(preserved, self._context.model) if self._graph.traced.leaf_paths else nullcontext
        gradients = frozenset(self._graph.placement.requires_grad)
        return ProfileInputs(
            arguments,
            gradients,
            state,
            self._world.device,
            around,
            self._compiled,
            touched=_touched(self._graph.task),
        )

    # -- links ------------------------------------------------------------------------------------------------

    def measured_links(self) -> tuple[LinkCost, LinkCost | None]:
        """Costs of links within a node and between nodes, measured unless already known. Collective."""
        if self._world.size == 1:
            found = self.known_links()
            assert found is not None
            return found
        data = self._world.broadcast_bytes(msgspec.msgpack.encode(self.known_links()))
        found = _KNOWN_LINKS.decode(data)
        if found is None:
            found = self._measure_links()
            client = self._context.cache.client
            if client is not None:
                client.put(self._link_key(), msgspec.msgpack.encode(found))
        self.links = found
        return found

    def known_links(self) -> tuple[LinkCost, LinkCost | None] | None:
        """What rank 0 knows of the links, and a single rank of its copies; not collective."""
        if self._world.size == 1 and self.links is None:
            self.links = copy_speed(self._world.device), None
        client = self._context.cache.client
        if self.links is not None or client is None:
            return self.links
        key = self._link_key()
        return understood(client, key, client.get(key), _LINKS)

    def _link_key(self) -> Key:
        return link_key(
            topology=[(slot.node, slot.device) for slot in self._world.slots],
            device_model=self._platform.device_model,
            backend=self._platform.backend,
            versions=self._platform.versions,
        )

    def _measure_links(self) -> tuple[LinkCost, LinkCost | None]:
        world = self._world
        assert world.forward is not None
        nodes: dict[int, list[int]] = {}
        for slot, place in enumerate(world.slots):
            nodes.setdefault(place.node, []).append(slot)
        if len(nodes) == 1:
            return measure_links(world.forward, world.device), None
        first, second, *_ = nodes.values()
        pair = (world.rank_of_slot[first[0]], world.rank_of_slot[second[0]])
        between = measure_links(world.forward, world.device, pair)
        shared = next((slots for slots in nodes.values() if len(slots) > 1), None)
        if shared is None:
            return between, None
        group = world.group_of(tuple(shared))
        told = b""
        if world.slot in shared:
            assert group is not None
            told = msgspec.msgpack.encode(measure_links(group, world.device))
        heard = world.gather_bytes(told)
        return msgspec.msgpack.decode(heard[world.rank_of_slot[shared[0]]], type=LinkCost), between
