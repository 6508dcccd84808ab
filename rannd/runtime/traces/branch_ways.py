"""Ways through the branches of a model's code (`if` on a tensor): what to do where there are many, or ranks differ.

Each way has a graph of its own (`rannd.graph.branches`). What branches differently on the ranks, or in many ways from
call to call, becomes one operator.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rannd import log
from rannd.errors import StepError, TraceError
from rannd.graph.call.signature import Signature
from rannd.graph.fx.traced import Decisions
from rannd.graph.modules.bisection import outermost
from rannd.graph.modules.methods import part_of
from rannd.graph.modules.source_location import described
from rannd.runtime.comm.context import Context
from rannd.runtime.parameters.ownership import Parameters

Branches = list[tuple[bool, str]]
"""Outcome of each branch, and the path of the module that branches."""

MOST_WAYS = 4
"""Number of ways through the branches of a call that get a graph each, before what branches runs as one operator."""

_AVOIDED = "a condition without a branch (torch.where), or a branch in a small submodule, costs less"


def branches_of(decisions: Decisions | None) -> Branches:
    """The branches that the model's code took while it was traced."""
    return list(zip(decisions.values, decisions.modules, strict=True)) if decisions is not None else []


def branching(ways: Sequence[Branches]) -> list[str]:
    """Paths of the modules that branch differently in some of the ways through a model."""
    found: dict[str, None] = {}
    first = ways[0]
    for other in ways[1:]:
        apart = [branch for pair in zip(first, other, strict=False) if pair[0] != pair[1] for branch in pair]
        more = max(first, other, key=len)[min(len(first), len(other)) :]
        found.update(dict.fromkeys(path for _, path in apart or more[:1]))
    return outermost(found)


class BranchWays:
    """The ways through the branches of one model's calls. The same on all ranks."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._world = context.world
        self.opaque: tuple[str, ...] = ()
        """Paths of modules that run as one operator, because their code branches differently from call to call."""
        self._found: dict[str, list[Branches]] = {}
        """Ways through the branches of each kind of call that were traced."""

    def of_ranks(self, decisions: Decisions | None) -> list[Branches]:
        """The branches that each rank takes. Collective."""
        told = self._world.gather_bytes(msgspec.msgpack.encode(branches_of(decisions)))
        return [msgspec.msgpack.decode(data, type=Branches) for data in told]

    def too_many(self, decisions: Decisions | None, signature: Signature, held: Parameters | None) -> list[Branches]:
        """The ways that the calls traced so far took, once there are many; [] if they can go on having a graph each.

        The branches of the present call are the same on all ranks.
        """
        ways = self._found.setdefault(signature.key(), [])
        branches = branches_of(decisions)
        if not branches or branches in ways:
            return []
        ways.append(branches)
        if len(ways) <= MOST_WAYS:
            return []
        paths = branching(ways)
        divided = any(self._stages(path, held) for path in paths)
        return [] if divided or set(paths) <= set(self.opaque) else list(ways)

    def join(
        self, ways: Sequence[Branches], decisions: Decisions | None, numbers: Sequence[int], held: Parameters | None
    ) -> None:
        """Let the modules that branch differently in these ways run as one operator from now on. Collective.

        Args:
            ways: Ways through the model, the same on all ranks.
            decisions: This rank's branches.
            numbers: Inputs of the graph that are numbers of the call.
            held: The model's parameters, once it is deployed.

        Raises:
            TraceError: The branches depend on `numbers`, which therefore have to be constants of the graph.
            StepError: A deployment has divided one of the modules.
        """
        by_number = decisions is not None and _decided_by(decisions, ways, numbers)
        if any(each for (each,) in self._world.gather_numbers([int(by_number)])):
            raise TraceError("numbers cannot be inputs of the graph: the model's code branches on them in many ways")
        paths = branching(ways)
        for path in paths:
            what = (
                f"{described(self._context.model, path)} takes other branches (`if` on a tensor) for other mini-batches"
            )
            if stages := self._stages(path, held):
                raise StepError(
                    f"the Python code of {what}. It has to run as one operator then, but its parameters are already in "
                    f"stages {', '.join(map(str, stages))}. Call model.undeploy() on all ranks and repeat the call, "
                    f"which plans the model anew; {_AVOIDED}"
                )
            if self._world.rank == 0:
                log.get("RaNNCModule").warning(
                    "The Python code of %s: it runs as one operator from now on, which is in one stage; %s",
                    what,
                    _AVOIDED,
                )
        new = set(paths) - set(self.opaque)
        self.opaque = tuple(outermost([*self.opaque, *paths])) if new else ("",)

    def _stages(self, path: str, held: Parameters | None) -> list[int]:
        """The stages that hold the parameters of a module, if there are several."""
        if held is None:
            return []
        inside = {id(parameter) for parameter in part_of(self._context.model, path).parameters()}
        stages = {held.owners[name] for name, tensor in held.tensors.items() if id(tensor) in inside}
        found = sorted({stage for each in stages for stage in each})
        return found if len(found) > 1 else []


def _decided_by(decisions: Decisions, ways: Sequence[Branches], numbers: Sequence[int]) -> bool:
    """Whether the first branch in which a call differs from one of `ways` depends on one of the inputs `numbers`."""
    mine = branches_of(decisions)
    apart = set()
    for way in ways:
        same = (number for number, pair in enumerate(zip(mine, way, strict=False)) if pair[0] != pair[1])
        first = next(same, min(len(mine), len(way)))
        if way != mine:
            apart.add(min(first, len(mine) - 1))
    return any(decisions.inputs(branch) & set(numbers) for branch in apart)
