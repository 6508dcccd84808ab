"""What the runtime itself takes of a machine's hosts, and messages of its links, as steps of any job have measured it.

It is in the cache, for plans of every graph.

Beside what it computes and waits for, a step takes of the host of a rank::

    host = call + each x (computations + messages)

This differs little from model to model, so it is kept for the machine and used for plans of every graph. What the graph
itself took counts more: its messages have other sizes and its parameters are more or fewer. A single plan does not tell
the two numbers apart; as in `correction.py` they are estimated together with what is known beforehand, which is also
what counts where no job has measured anything.

Links are measured alone, where nobody computes beside them. So their latency, and the time of a byte, have a factor
each, near 1 as far as is known beforehand::

    transfer = factor x latency + factor x bytes / bandwidth

Reductions of gradients have two factors of their own: in steps they read and write what is in no cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from rannd.plan.measured_step import MeasuredStep
from rannd.plan.schedule.program import Edge
from rannd.profile.costs import LinkCost, RuntimeCost
from rannd.profile.points import LONGEST_US

RUNTIME_FORMAT = 2
MOST_HOSTS, MOST_TRANSFERS, MOST_REDUCTIONS = 64, 64, 64
"""Maximum number of measured ranks, messages, and reductions, that are kept: the latest."""
CALL_US, EACH_US = (2000.0, 4000.0), (60.0, 150.0)
"""Mean and standard deviation of both numbers before anything is measured (docs/benchmarks.md, Estimates)."""
OWN_NOISE, OTHER_NOISE, NOISE_US = 0.05, 0.3, 100.0
"""Standard deviation of what ranks took, relative to it: of the same graph, of others; and in microseconds."""
LINK_SPREAD, LINK_NOISE, LINK_NOISE_US = 0.5, 0.1, 20.0
"""Standard deviation of the factors of a link around 1; of a message's time, relative to it, and in microseconds."""
LEAST_FACTOR, MOST_FACTOR = 0.2, 5.0
"""What these factors can be."""
_MOST_HANDLED, _MOST_BYTES = 1 << 30, 1 << 50


class HostTook(msgspec.Struct, frozen=True, array_like=True):
    """What a step took of a rank's host, in microseconds (`RankTimes.runtime_us`), without the bytes of messages."""

    graph: str
    """First digits of the graph's hash."""
    handled: int
    """Computations and messages."""
    us: float


class TransferTook(msgspec.Struct, frozen=True, array_like=True):
    """How long a message was on its way, in microseconds (`Flight.us`)."""

    between: bool
    """Whether it was from one node to another."""
    nbytes: int
    us: float


class ReductionsTook(msgspec.Struct, frozen=True, array_like=True):
    """How long the reductions of a step took, in microseconds."""

    between: bool
    """Whether they were among ranks of several nodes."""
    rounds: float
    """Messages that a rank sends, in pairs: how often `LinkCost.allreduce_latency_us` counts."""
    nbytes: float
    """That a rank sends."""
    us: float


class LearnedRuntime(msgspec.Struct, frozen=True):
    """What is known of a machine's hosts and links, for so many ranks on each."""

    format: int = RUNTIME_FORMAT
    hosts: tuple[HostTook, ...] = ()
    """The latest first."""
    transfers: tuple[TransferTook, ...] = ()
    """The latest first."""
    reductions: tuple[ReductionsTook, ...] = ()
    """The latest first."""

    def and_those(
        self,
        graph_hash: str,
        measured: MeasuredStep,
        nbytes: Mapping[Edge, int],
        *,
        byte_us: float = 0.0,
        reduced: Sequence[ReductionsTook] = (),
    ) -> LearnedRuntime:
        """Return what is known after steps of a plan of the graph; they replace older ones like them.

        Args:
            graph_hash: Of the graph.
            measured: The steps.
            nbytes: Bytes of a microbatch's values on each edge.
            byte_us: What plans count for each byte of a message on both sides (`LinkCost.p2p_host_us`).
            reduced: Reductions of the steps.
        """
        found: dict[tuple[str, int], HostTook] = {}
        for rank in measured.ranks:
            # What a rank gets and what it sends are on the same edges, values in one direction, gradients in the other.
            moved = 2 * sum(each.messages * nbytes.get((each.src, each.dst), 0) for each in rank.waits)
            each = HostTook(_short(graph_hash), rank.handled, rank.runtime_us - moved * byte_us)
            there = found.get((each.graph, each.handled))
            if each.us > 0 and (there is None or each.us < there.us):
                found[each.graph, each.handled] = each
        old = (each for each in self.hosts if (each.graph, each.handled) not in found)
        sent: dict[tuple[bool, int], TransferTook] = {}
        for flight in measured.flights:
            size = nbytes.get((flight.src, flight.dst), 0)
            if size > 0:
                sent.setdefault((flight.between, size), TransferTook(flight.between, size, flight.us))
        before = (each for each in self.transfers if (each.between, each.nbytes) not in sent)
        hosts, transfers = (*found.values(), *old)[:MOST_HOSTS], (*sent.values(), *before)[:MOST_TRANSFERS]
        alike = {(each.between, each.rounds, each.nbytes) for each in reduced}
        others = (each for each in self.reductions if (each.between, each.rounds, each.nbytes) not in alike)
        return LearnedRuntime(RUNTIME_FORMAT, hosts, transfers, (*reduced, *others)[:MOST_REDUCTIONS])

    def cost(self, graph_hash: str, action_us: float, *, queued: bool) -> RuntimeCost:
        """Return what the runtime takes of steps of a graph, whose actions take `action_us` in addition.

        `queued`: whether the hosts work ahead of their devices, so that their time does not count.
        """
        if queued:
            return RuntimeCost(action_us)
        return RuntimeCost(action_us, *_fitted(self.hosts, _short(graph_hash)))

    def links(self, near: LinkCost, far: LinkCost | None) -> tuple[LinkCost, LinkCost | None]:
        """Return what links within a node and between nodes cost in steps, from what they cost alone."""
        return self._corrected(near, between=False), None if far is None else self._corrected(far, between=True)

    def _corrected(self, link: LinkCost, *, between: bool) -> LinkCost:
        """Return the cost of a link by which all of this takes as long as it took, as far as that is likely."""
        alone = link.p2p_latency_us, 1 / link.p2p_bytes_per_us
        sent = [((1.0, each.nbytes), each.us) for each in self.transfers if each.between == between]
        latency, size = _factors(alone, sent)
        alone = link.allreduce_latency_us, 1 / link.allreduce_bytes_per_us
        reduced = [((each.rounds, each.nbytes), each.us) for each in self.reductions if each.between == between]
        reduce_latency, reduce_size = _factors(alone, reduced)
        return LinkCost(
            latency * link.p2p_latency_us,
            link.p2p_bytes_per_us / size,
            reduce_latency * link.allreduce_latency_us,
            link.allreduce_bytes_per_us / reduce_size,
            link.p2p_host_us,
            reduce_size * link.allreduce_host_us,  # all of their time, or nothing
        )

    @property
    def is_plausible(self) -> bool:
        """Whether it can be true: validates what was read from the cache."""
        return (
            self.format == RUNTIME_FORMAT
            and len(self.hosts) <= MOST_HOSTS
            and len(self.transfers) <= MOST_TRANSFERS
            and len(self.reductions) <= MOST_REDUCTIONS
            and all(0 <= each.handled <= _MOST_HANDLED and 0 <= each.us <= LONGEST_US for each in self.hosts)
            and all(0 < each.nbytes <= _MOST_BYTES and 0 <= each.us <= LONGEST_US for each in self.transfers)
            and all(
                0 < each.rounds <= _MOST_HANDLED and 0 < each.nbytes <= _MOST_BYTES and 0 <= each.us <= LONGEST_US
                for each in self.reductions
            )
        )


def _fitted(hosts: Iterable[HostTook], graph: str) -> tuple[float, float]:
    """Return the time of a call, and of each computation and message; neither is negative."""
    rows, wanted = [], []
    for each in hosts:
        noise = (OWN_NOISE if each.graph == graph else OTHER_NOISE) * each.us + NOISE_US
        rows.append([1 / noise, each.handled / noise])
        wanted.append(each.us / noise)
    for place, (mean, spread) in enumerate((CALL_US, EACH_US)):
        rows.append([(place == 0) / spread, (place == 1) / spread])
        wanted.append(mean / spread)
    call_us, each_us = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    return max(float(call_us), 0.0), max(float(each_us), 0.0)


def _factors(alone: tuple[float, float], took: Iterable[tuple[tuple[float, float], float]]) -> tuple[float, float]:
    """Return the factors of a link's latency and of the time of a byte by which steps are likely.

    Args:
        alone: Both times as the link was measured alone, in microseconds.
        took: How often each counts in something, and how long that took.
    """
    rows, wanted = [[1 / LINK_SPREAD, 0.0], [0.0, 1 / LINK_SPREAD]], [0.0, 0.0]
    for counts, us in took:
        noise = LINK_NOISE * us + LINK_NOISE_US
        parts = [count * one for count, one in zip(counts, alone, strict=True)]
        rows.append([part / noise for part in parts])
        wanted.append((us - sum(parts)) / noise)  # what differs from factors of 1
    found = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    latency, size = (min(max(1.0 + float(each), LEAST_FACTOR), MOST_FACTOR) for each in found)
    return latency, size


def _short(graph_hash: str) -> str:
    return graph_hash[:16]
