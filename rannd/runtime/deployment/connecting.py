"""Before a graph is run: its Programs are checked, and the ranks that it lets talk to each other are connected."""

from __future__ import annotations

import dataclasses

from rannd import log
from rannd.errors import PlanError
from rannd.plan.schedule.program import OF_GRADIENTS, TRANSFERS, Program
from rannd.plan.schedule.program_checker import check
from rannd.plan.schedule.stream_checker import StreamRules, check_streams
from rannd.runtime.binding.bound_graph import BoundGraph
from rannd.runtime.binding.traffic import Traffic
from rannd.runtime.comm.world import World
from rannd.runtime.transport.transport import Pair, Transport, pair


def connect(world: World, bound: BoundGraph) -> BoundGraph:
    """Check the steps of a graph under the rules of the job's transport, and make all connections that they need.

    Returns the graph, with what was found out about the overlap of reductions. Collective over all ranks.

    Raises:
        PlanError: A step would not end, or would compute something else.
    """
    traffic = _checked(bound.traffic, world.transport, meets=bound.meets)
    interleaved = bound.interleaved
    pairs = pairs_of(traffic.program)
    if interleaved is not None:
        interleaved = dataclasses.replace(
            interleaved, traffic=_checked(interleaved.traffic, world.transport, meets=bound.meets)
        )
        pairs |= pairs_of(interleaved.traffic.program)
    for lender, borrowers in bound.borrowed.values():
        pairs |= {pair(False, lender, each) for each in borrowers}
    world.open(pairs)
    if bound.graph.placement.written:  # buffers that replicas of a stage agree on
        for slots in bound.layout.stages:
            world.group_of(slots)
    return dataclasses.replace(bound, traffic=traffic, interleaved=interleaved)


def _checked(traffic: Traffic, transport: Transport, *, meets: bool) -> Traffic:
    check(traffic.program)
    rules = transport.rules
    if rules is None and meets:  # a replica that waits for another holds up who waits for it
        rules = StreamRules(synchronises=False, overlap=False)
    if rules is None:
        return traffic
    rules = dataclasses.replace(rules, meets=meets)
    try:
        check_streams(traffic.program, transport.posting, rules)
    except PlanError as exc:
        check_streams(traffic.program, transport.posting, dataclasses.replace(rules, overlap=False))
        log.get("RaNNCModule").debug("Gradients are reduced at the end of a step, not in its last backward: %s", exc)
        return dataclasses.replace(traffic, overlaps=False)
    return traffic


def pairs_of(program: Program) -> set[Pair]:
    """Slots that exchange values or gradients in a step."""
    return {
        pair(action.kind in OF_GRADIENTS, slot, action.peer)
        for slot, actions in enumerate(program.slots)
        for action in actions
        if action.kind in TRANSFERS
    }
