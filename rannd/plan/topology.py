"""The devices of a plan and the links between them: which transfers stay inside a node.

Slots are assigned to stages in one of two orders. For 4 stages with 2 replicas each on 2 nodes of 4 devices:

    "stages"      neighbours are stages of one pipeline       node 0: 0a 1a 2a 3a   node 1: 0b 1b 2b 3b
    "replicas"    neighbours are replicas of one stage        node 0: 0a 0b 1a 1b   node 1: 2a 2b 3a 3b

The first keeps transfers between stages inside the nodes, the second the reduction of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from rannd.plan.deployment import Slot
from rannd.profile.costs import LinkCost, RuntimeCost

Table = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]

PLACEMENTS = ("stages", "replicas")
AGREEMENTS = 3


class Machine:
    """Slots in order, and the two kinds of links between them."""

    def __init__(
        self,
        slots: Sequence[Slot],
        link: LinkCost,
        between: LinkCost | None,
        runtime: RuntimeCost = RuntimeCost(),  # noqa: B008  (frozen)
    ) -> None:
        """Args: `slots`: sorted; `link`: inside a node; `between`: between nodes (None: the same)."""
        self.runtime = runtime
        self.world = len(slots)
        self.nodes = np.array([slot.node for slot in slots])
        self.link, self.between = link, between or link
        self.several = bool(self.nodes[0] != self.nodes[-1]) and self.between != link
        """Whether nodes matter: there are several, and links between them differ."""
        self._inside: dict[tuple[bytes, int], tuple[Mask, Mask, Mask]] = {}

    @property
    def placements(self) -> tuple[str, ...]:
        """The slot orders to try."""
        return PLACEMENTS if self.several else PLACEMENTS[:1]

    @property
    def agreeing_us(self) -> float:
        """Time of a step beside blocks, activations and gradients: its small collectives, and the runtime's."""
        return agreeing_us(self.between if self.several else self.link, self.world) + self.runtime.call_us

    def pipelines_inside(self, replicas: Counts) -> Mask:
        """Return for numbers of replicas whether each of the pipelines side by side stays inside a node.

        Pipeline g of R has the slots from g W / R to (g + 1) W / R. It does where nodes do not matter.
        """
        borders = np.flatnonzero(np.diff(self.nodes)) + 1 if self.several else np.zeros(0, dtype=np.int64)
        result: Mask = (borders[:, None] * replicas % self.world == 0).all(axis=0)
        return result

    def inside(self, replicas: Counts, used: int) -> tuple[Mask, Mask, Mask]:
        """Return for numbers of replicas of a stage before the last `used` slots what stays inside a node.

        Activations from the slot before the stage, gradients from the slot after it, and reductions of the stage. What
        comes from no slot does.
        """
        key = replicas.tobytes(), used
        if key not in self._inside:
            end = self.world - used
            nodes, first = self.nodes, np.maximum(end - replicas, 0)
            starts = nodes[first]
            self._inside[key] = (
                (first == 0) | (nodes[first - 1] == nodes[end - 1]),
                (starts == nodes[end]) if used else np.ones(len(replicas), dtype=bool),
                starts == nodes[end - 1],
            )
        return self._inside[key]


def p2p_us(link: LinkCost, nbytes: Table) -> Table:
    """:meth:`LinkCost.p2p_us` for arrays of sizes."""
    byte_us = max(1.0 / link.p2p_bytes_per_us - 2.0 * link.p2p_host_us, 0.0)
    result: Table = np.where(nbytes > 0, link.p2p_latency_us + nbytes * byte_us, 0.0)
    return result


def allreduce_us(link: LinkCost, nbytes: Table, ranks: npt.ArrayLike) -> Table:
    """:meth:`LinkCost.allreduce_us` for arrays of sizes and numbers of ranks."""
    count = np.asarray(ranks, dtype=float)
    steps = 2.0 * (count - 1.0)
    whole = steps / 2.0 * link.allreduce_latency_us + steps / count * nbytes / link.allreduce_bytes_per_us
    result: Table = np.where((nbytes > 0) & (count > 1), whole, 0.0)
    return result


def reduction_us(link: LinkCost, nbytes: Table, ranks: npt.ArrayLike) -> tuple[Table, Table]:
    """:meth:`LinkCost.reduction_us` for arrays of sizes and numbers of ranks."""
    whole, count = allreduce_us(link, nbytes, ranks), np.asarray(ranks, dtype=float)
    host = np.minimum(2.0 * (count - 1.0) / count * nbytes * link.allreduce_host_us, whole)
    return whole - host, host


def agreeing_us(link: LinkCost, world: int) -> float:
    """Time of the small collectives of a step: agreement on the call, on the backward, and the sum of losses."""
    return AGREEMENTS * math.ceil(math.log2(world)) * link.allreduce_latency_us


def place(replicas: Sequence[int], placement: str) -> tuple[tuple[int, ...], ...]:
    """Assign slots to the replicas of each stage.

    "replicas": each stage has the slots after those of the previous stage. "stages": replica j of R serves the ranks
    around (j + 1/2) / R of the world, and gets a slot there. If stages have equally many replicas, those that a rank's
    microbatches pass through are neighbours (on one node, if they fit), and the rank's own slot is one of them.
    Otherwise each of the pipelines side by side (Layout.pipelines) has neighbouring slots.
    """
    if placement == "replicas":
        return tuple(tuple(range(a, b)) for a, b in pairwise(accumulate(replicas, initial=0)))
    centres = sorted(
        ((2 * replica + 1) / (2 * count), stage, replica)
        for stage, count in enumerate(replicas)
        for replica in range(count)
    )
    slots: list[list[int]] = [[] for _ in replicas]
    for slot, (_, stage, _) in enumerate(centres):
        slots[stage].append(slot)
    return tuple(tuple(each) for each in slots)
