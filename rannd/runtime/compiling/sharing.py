"""Compiles each kind of unit once on a node: one of the ranks that need it; the others load what it has made."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from rannd import log
from rannd.log import Progress
from rannd.runtime.comm.context import Context
from rannd.runtime.compiling.compiler import (
    Code,
    compile_kind,
    end_workers,
    forgotten,
    known,
    look_at_cpu,
    looks_at_cpu,
    reason,
    threads_of,
)
from rannd.runtime.compiling.kept_code import KeptCode
from rannd.runtime.compiling.kinds import Kind

Found: TypeAlias = Code | str
"""Code of a kind, or why it cannot be compiled."""


class _Told(msgspec.Struct, frozen=True):
    """What one rank tells about its kinds."""

    made: tuple[str, ...]
    loaded: tuple[str, ...]
    failed: dict[str, str]
    seconds: float
    """Time that compiling and loading took, also before (to measure blocks)."""


def compile_shared(context: Context, kept: KeptCode, wanted: Mapping[str, Kind]) -> dict[str, Found]:
    """Compile or load the kinds that this rank needs, by digest. Collective over all ranks of the job."""
    world = context.world
    begun = time.monotonic()
    nodes = [world.slots[world.rank_of_slot.index(rank)].node for rank in range(world.size)]
    lists = [
        msgspec.msgpack.decode(each, type=list[str])
        for each in world.gather_bytes(msgspec.msgpack.encode(list(wanted)))
    ]
    owner = _owners(nodes, lists)
    found: dict[str, Found] = {}
    here = nodes[world.rank]
    mine = [digest for digest, kind in wanted.items() if owner[here, digest] == world.rank or kept.has(kind)]
    with Progress(
        "RaNNCModule", "Compiled {done} of {total} kinds of blocks", len(mine), shown=world.rank == 0
    ) as progress:
        for digest in mine:
            found[digest] = compiled(kept, wanted[digest], world.local_size)
            progress.step()
    failed = {digest: each for digest, each in found.items() if isinstance(each, str)}
    told = _told(context, found, failed)
    everywhere = {digest: why for each in told for digest, why in each.failed.items()}
    for digest, kind in wanted.items():
        if digest not in found:
            found[digest] = everywhere.get(digest) or compiled(kept, kind, world.local_size)
    failed = {digest: each for digest, each in found.items() if isinstance(each, str)}
    told = [*told, *_told(context, {digest: each for digest, each in found.items() if digest not in mine}, failed)]
    for kind in forgotten(world.device):  # of other graphs, when this one was traced
        compiled(kept, kind, world.local_size)
    if threads_of(world.device, world.local_size) > 1:
        end_workers()
    _list(context, kept)
    if world.rank == 0:
        _tell(told, max(time.monotonic() - begun, *(each.seconds for each in told)))
    return found


def compiled(kept: KeptCode, kind: Kind, ranks: int) -> Found:
    """Code of a kind, from this process, torch's cache or the compiler; why not, if it cannot be compiled."""
    try:
        code = known(kind, kept.device)
        if code is not None:
            return code
        if looks_at_cpu(kept.device):  # apart from the kinds: it would be missing in the folders of all but the first
            with kept.opened_key(kept.make_key("instructions of the CPU", 0)):
                look_at_cpu()
        with kept.opened(kind):
            return compile_kind(kind, kept.device, threads_of(kept.device, ranks))
    except Exception as exc:  # torch.compile raises what it likes; the unit then runs eagerly
        log.get("RaNNCModule").debug("A block cannot be compiled", exc_info=exc)
        return reason(exc)


def _owners(nodes: list[int], lists: list[list[str]]) -> dict[tuple[int, str], int]:
    """The rank that compiles each kind on each node: of those that need it, the one with the fewest so far."""
    needing: dict[tuple[int, str], list[int]] = {}
    for rank, digests in enumerate(lists):
        for digest in digests:
            needing.setdefault((nodes[rank], digest), []).append(rank)
    load: Counter[int] = Counter()
    owner = {}
    for place, ranks in sorted(needing.items(), key=lambda each: (len(each[1]), each[0])):
        owner[place] = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner[place]] += 1
    return owner


def _told(context: Context, found: Mapping[str, Found], failed: dict[str, str]) -> list[_Told]:
    codes = [(digest, code) for digest, code in found.items() if isinstance(code, Code)]
    mine = _Told(
        tuple(digest for digest, code in codes if code.made),
        tuple(digest for digest, code in codes if not code.made),
        failed,
        sum(code.seconds for _, code in codes),
    )
    return [
        msgspec.msgpack.decode(each, type=_Told) for each in context.world.gather_bytes(msgspec.msgpack.encode(mine))
    ]


def _list(context: Context, kept: KeptCode) -> None:
    """Enter the folders that this process has used into the daemon's cache, or note their use there."""
    used = dict(kept.used())
    if used:
        with context.cache.connect() as client:
            there = zip(used, client.get_many(list(used)), strict=True)
            client.put_many((key, str(used[key]).encode()) for key, value in there if value is None)


def _tell(told: list[_Told], seconds: float) -> None:
    logger = log.get("RaNNCModule")
    made = {digest for each in told for digest in each.made}
    loaded = {digest for each in told for digest in each.loaded} - made
    failed = {digest: why for each in told for digest, why in each.failed.items()}
    if made:
        logger.info("Compiled %s in %.1f s (%d from the cache)", _kinds(len(made)), seconds, len(loaded))
    elif loaded:
        logger.info("%s from the cache (%.1f s)", _kinds(len(loaded)), seconds)
    for why in dict.fromkeys(failed.values()):
        count = sum(each == why for each in failed.values())
        logger.warning("%s cannot be compiled and %s eagerly: %s", _kinds(count), "runs" if count == 1 else "run", why)


def _kinds(count: int) -> str:
    return "1 kind of blocks" if count == 1 else f"{count} kinds of blocks"
