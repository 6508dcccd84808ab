"""Measures the blocks of a model: each distinct structure on all ranks of one node, at the same moment.

What ranks of a node share (memory, caches) is then as busy as in a step. Other processes come and go; so turns through
all parts are spread over time, and what varies much gets more turns, as far as a time budget goes::

    look at each part    bytes kept, row counts that fit, about how long it takes
    2 turns              each part, beside each other rank; few runs of long parts, more of short ones
    a third one          parts whose first two differ by what matters for the sum over all parts
    more turns           of these, parts that vary, and those whose turns took less than 2 s; for half as long as the
                         first ones took, or a second
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import msgspec
import torch
from torch.fx import Node

from rannd import log
from rannd.graph.model import ModelGraph
from rannd.graph.partition.cut import Part, extract, shared_early
from rannd.log import Progress
from rannd.profile.measure import FEWEST_RUNS, Meet, ProfiledPart, ProfileInputs, finish
from rannd.profile.points import Measured
from rannd.profile.samples import Turn, counted

FEWEST_TURNS, TURNS = 2, 3
"""Number of turns of each part: where they differ by little, and where by more. What differs by little makes the sum
over all parts wrong by at most this fraction:"""
EQUAL = 0.02
LONG_S = 2.0
"""Total seconds of a part's turns after which it has no others, unless it varies."""
RUN_US = 10_000.0
"""Microseconds of forwards and backwards in a turn, of one part with one number of rows, at least,"""
MOST_RUNS = 5
"""but not more runs than these, nor less than `FEWEST_RUNS`."""
EXTRA_S = 1.0
"""Seconds for turns of parts that vary; for large models half as long as the first turns took, if that is more."""
MOST_TURNS = 12
"""Maximum number of turns."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that measure together.

    `local`: number of this rank among those of its node. `gather`: all-gather of bytes over all ranks. `meet`: barrier
    of the ranks of the node.
    """

    local: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    gather: Callable[[bytes], list[bytes]] = lambda data: [data]
    meet: Meet = lambda: None


ALONE = Ranks()


class _Told(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells after a turn. `seconds`: since it began."""

    seconds: float
    first: dict[str, Measured]
    turns: dict[str, Turn]


_told = msgspec.msgpack.Decoder(list[_Told])


def block_part(graph: ModelGraph, ops: Sequence[int], name: str = "Block", *, given: Set[Node] = frozenset()) -> Part:
    """Extract a block (op numbers of the task graph) as a module that can run alone.

    `given`: what comes in as an input though the block could compute it, see `given_in_stages`.
    """
    nodes: list[Node] = list(graph.nodes.values())
    return extract(graph.traced, graph.placement, {nodes[op] for op in ops}, name, given=given)


def given_in_stages(graph: ModelGraph, parts: Iterable[Sequence[int]]) -> Set[Node]:
    """Return what each of several parts (op numbers) would compute from arguments alone, such as masks.

    A stage computes it once, for all of its parts: it is no cost of any of them. Without integers, which parts compute
    from the arguments: synthetic ones may be no indices, lengths or divisors.
    """
    nodes: list[Node] = list(graph.nodes.values())
    shared = shared_early(graph.placement, [{nodes[op] for op in ops} for ops in parts])
    return {node for node in shared if (dtype := node.meta["val"].dtype).is_floating_point or dtype == torch.bool}


def measure_alone(part: Part, sample: ProfileInputs, rows: Sequence[int], crossing: Sequence[str] = ()) -> Measured:
    """Measure one part on this rank alone, see `measure_missing`."""
    return measure_missing({"": tuple(rows)}, lambda _: (part, crossing), sample, ALONE)[""]


def measure_missing(
    missing: Mapping[str, tuple[int, ...]],
    part_of: Callable[[str], tuple[Part, Sequence[str]]],
    sample: ProfileInputs,
    ranks: Ranks,
    tell: Callable[[float], None] | None = None,
    often: Mapping[str, int] | None = None,
) -> dict[str, Measured]:
    """Measure the blocks in `missing`, each on one of the nodes, and return the results on all ranks.

    Collective. A ProfileError on one rank is raised on that rank only.

    Args:
        missing: Row counts to measure, by hash of the block.
        part_of: Returns a block and the names of the values that cross its border, see `ProfiledPart`.
        sample: Inputs and parameters for the measurements.
        ranks: This rank and the others.
        tell: Called with the fraction of the measurements that is done.
        often: How often each block is in the model, by hash; None: once. It says how exact its times have to be.
    """
    if not missing:
        return {}
    mine = list(missing)[ranks.node :: ranks.nodes]
    begun = time.perf_counter()
    first: dict[str, Measured] = {}
    turns: dict[str, list[Turn]] = {key: [] for key in missing}

    def exchange(own_first: Mapping[str, Measured], own: Mapping[str, Turn]) -> float:
        """Gather what all ranks have found in a turn; returns the seconds since the slowest rank began."""
        told = _Told(time.perf_counter() - begun, dict(own_first), dict(own))
        every = [each for data in ranks.gather(msgspec.msgpack.encode([told])) for each in _told.decode(data)]
        for each in every:
            for key, found in each.first.items():
                first[key] = _smaller(found, first.get(key))
        for key, before in turns.items():
            now = [each.turns[key] for each in every if key in each.turns]
            if now:
                before.append(now[0].and_those(now[1:]))
        return max(each.seconds for each in every)

    count = len(mine) * (1 + TURNS)
    text, shown = "Measuring the parts of the model: {done} of {total} turns", ranks.node == ranks.local == 0
    with Progress("GraphProfiler", text, count, shown=shown, tell=tell) as progress:
        parts = _prepared(mine, part_of, sample, ranks)
        looked: dict[str, Measured] = {}
        for key in mine:
            ranks.meet()
            looked[key] = parts[key].first(missing[key])
            progress.step()
        exchange(looked, {})
        spent = enough = 0.0
        for number in range(MOST_TURNS):
            chosen = _chosen(first, turns, often or {}, number)
            if not chosen or (number >= TURNS and spent > enough + max(EXTRA_S, enough / 2)):
                break
            own: dict[str, Turn] = {}
            for key in mine:
                if key in chosen:
                    own[key] = parts[key].turn(_runs(first[key]), ranks.meet)
                if number < TURNS:
                    progress.step()
            spent = exchange({}, own)
            enough = spent if number < TURNS else enough
    finish()
    found = {key: counted(first[key], every) for key, every in turns.items()}
    noisy = sum(any(point.is_noisy for point in each.points) for each in found.values())
    if noisy and ranks.node == ranks.local == 0:
        log.get("GraphProfiler").log(
            log.DETAIL,
            "The times of %d of %d parts vary by more than 5 %%: other processes use this machine. The next job that "
            "measures anything of this model measures them again",
            noisy,
            len(found),
        )
    return found


def _prepared(
    keys: Sequence[str], part_of: Callable[[str], tuple[Part, Sequence[str]]], sample: ProfileInputs, ranks: Ranks
) -> dict[str, ProfiledPart]:
    """Extract parts, and compile them if compiled code is measured: each first on one rank of the node."""
    own = keys[ranks.local :: ranks.local_size]
    given = {key: part_of(key) for key in own}
    ranks.meet()
    given |= {key: part_of(key) for key in keys if key not in given}
    return {key: ProfiledPart(given[key][0], sample, given[key][1]) for key in keys}


def _chosen(
    first: Mapping[str, Measured], turns: Mapping[str, Sequence[Turn]], often: Mapping[str, int], number: int
) -> set[str]:
    """Return the parts that have a turn, the same on all ranks: all in the first ones, then those that vary."""
    if number == 0:
        return set(turns)
    points = {key: counted(first[key], before).points for key, before in turns.items()}
    weight = {key: often.get(key, 1) * each[-1].us for key, each in points.items()}
    total = sum(weight.values())
    found = set()
    for key, before in turns.items():
        differs = max(point.spread for point in points[key]) * weight[key] > EQUAL * total / len(points)
        varies = any(point.is_noisy for point in points[key])
        short = sum(turn.seconds for turn in before) < LONG_S
        if (number < FEWEST_TURNS and (short or varies)) or (differs and (varies or (short and number < TURNS))):
            found.add(key)
    return found


def _runs(first: Measured) -> dict[int, int]:
    """Return how often to run each row count in a turn."""
    return {
        point.rows: min(max(math.ceil(RUN_US / max(point.us, 1.0)), FEWEST_RUNS), MOST_RUNS) for point in first.points
    }


def _smaller(found: Measured, other: Measured | None) -> Measured:
    """Join what two ranks have found: the tighter bound, and row counts that fit on both, or else below that bound."""
    if other is None:
        return found
    both = {point.rows for point in found.points} & {point.rows for point in other.points}
    tighter = min((found, other), key=lambda each: each.too_many or math.inf)
    points = tuple(point for point in tighter.points if point.rows in both) or tighter.points
    bounds = [each.too_many for each in (found, other) if each.too_many]
    return msgspec.structs.replace(other, points=points, too_many=min(bounds, default=0))
