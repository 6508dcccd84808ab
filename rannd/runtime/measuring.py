"""Costs of blocks and links on the devices of this job: known ones from the cache, others measured and kept there."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import msgspec
import torch
from torch import nn

from rannd.daemon.client import Client
from rannd.daemon.keys import Key, link_key, profile_key
from rannd.graph.model import ModelGraph
from rannd.graph.opaque import preserved
from rannd.graph.structure import block_hashes
from rannd.plan.blocks import Block
from rannd.profile.blocks import block_parts, measure_missing
from rannd.profile.costs import BlockCost, CostTable, LinkCost
from rannd.profile.links import copy_speed, measure_links
from rannd.profile.measure import Sample
from rannd.runtime.world import World


_LINKS = msgspec.msgpack.Decoder(tuple[LinkCost, LinkCost | None])


class Measuring:
    """Measures one graph. `leaves`: this rank's arguments; `rows`: of each rank; the rest goes into keys."""

    def __init__(
        self,
        world: World,
        graph: ModelGraph,
        model: nn.Module,
        leaves: Sequence[torch.Tensor],
        rows: Sequence[int],
        *,
        device_model: str,
        backend: str,
        versions: Mapping[str, str],
    ) -> None:
        self._world = world
        self._graph = graph
        self._model = model
        self._leaves = leaves
        self._rows = tuple(rows)
        self._model_name = device_model
        self._backend = backend
        self._versions = versions

    def costs(self, client: Client | None, blocks: Sequence[Block]) -> CostTable:
        """Costs of all blocks, measured where they are not known, and of the links. Collective."""
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
        return CostTable(tuple(costs[each] for each in hashes), *self._links(client))

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

    def _links(self, client: Client | None) -> tuple[LinkCost, LinkCost | None]:
        """Links inside a node and between nodes, as CostTable has them. Collective."""
        if self._world.size == 1:
            return copy_speed(self._world.device), None
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
            return _LINKS.decode(data)
        links = self._measure_links()
        if client is not None:
            client.put(key, msgspec.msgpack.encode(links))
        return links

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
