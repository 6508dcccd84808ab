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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from rannd.plan.measured_step import MeasuredStep
from rannd.plan.schedule.program import Edge
from rannd.profile.costs import LinkCost, RuntimeCost
from rannd.profile.points import LONGEST_US

RUNTIME_FORMAT = 1
MOST_HOSTS, MOST_TRANSFERS = 64, 64
"""Maximum number of measured ranks, and messages, that are kept: the latest."""
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
    """What a step took of a rank's host, in microseconds (`RankTimes.runtime_us`)."""

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


class LearnedRuntime(msgspec.Struct, frozen=True):
    """What is known of a machine's hosts and links, for so many ranks on each."""

    format: int = RUNTIME_FORMAT
    hosts: tuple[HostTook, ...] = ()
    """The latest first."""
    transfers: tuple[TransferTook, ...] = ()
    """The latest first."""

    def and_those(self, graph_hash: str, measured: MeasuredStep, nbytes: Mapping[Edge, int]) -> LearnedRuntime:
        """Return what is known after steps of a plan of the graph; they replace older ones like them.

        `nbytes`: bytes of a microbatch's values on each edge.
        """
        found: dict[tuple[str, int], HostTook] = {}
        for rank in measured.ranks:
            each = HostTook(_short(graph_hash), rank.handled, rank.runtime_us)
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
        return LearnedRuntime(RUNTIME_FORMAT, hosts, transfers)

    def cost(self, graph_hash: str, action_us: float, *, queued: bool) -> RuntimeCost:
        """Return what the runtime takes of steps of a graph, whose actions take `action_us` in addition.

        `queued`: whether the hosts work ahead of their devices, so that their time does not count.
        """
        if queued:
            return RuntimeCost(action_us)
        return RuntimeCost(action_us, *_fitted(self.hosts, _short(graph_hash)))

    def links(self, near: LinkCost, far: LinkCost | None) -> tuple[LinkCost, LinkCost | None]:
        """Return what links within a node and between nodes cost in steps, from what they cost alone."""
        inside = [each for each in self.transfers if not each.between]
        between = [each for each in self.transfers if each.between]
        return _corrected(near, inside), None if far is None else _corrected(far, between)

    @property
    def is_plausible(self) -> bool:
        """Whether it can be true: validates what was read from the cache."""
        return (
            self.format == RUNTIME_FORMAT
            and len(self.hosts) <= MOST_HOSTS
            and len(self.transfers) <= MOST_TRANSFERS
            and all(0 <= each.handled <= _MOST_HANDLED and 0 <= each.us <= LONGEST_US for each in self.hosts)
            and all(0 < each.nbytes <= _MOST_BYTES and 0 <= each.us <= LONGEST_US for each in self.transfers)
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


def _corrected(link: LinkCost, transfers: Sequence[TransferTook]) -> LinkCost:
    """Return the cost of a link by which these messages take as long as they took, as far as that is likely."""
    rows, wanted = [], []
    for each in transfers:
        noise = LINK_NOISE * each.us + LINK_NOISE_US
        alone = link.p2p_latency_us, each.nbytes / link.p2p_bytes_per_us
        rows.append([us / noise for us in alone])
        wanted.append((each.us - sum(alone)) / noise)  # what differs from factors of 1
    rows += [[1 / LINK_SPREAD, 0.0], [0.0, 1 / LINK_SPREAD]]
    found = np.linalg.lstsq(np.array(rows), np.array([*wanted, 0.0, 0.0]), rcond=None)[0]
    latency, size = (min(max(1.0 + float(each), LEAST_FACTOR), MOST_FACTOR) for each in found)
    return msgspec.structs.replace(
        link, p2p_latency_us=latency * link.p2p_latency_us, p2p_bytes_per_us=link.p2p_bytes_per_us / size
    )


def _short(graph_hash: str) -> str:
    return graph_hash[:16]
