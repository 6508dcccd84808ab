"""The user's optimizer on one rank: its param_groups reduced to this rank's parameters, and a record of all of them.

The groups keep their order and settings and lose other ranks' parameters in place, so that learning rate schedulers
and gradient scalers, which hold the optimizer, need no change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rannd import log
from rannd.errors import UsageError
from rannd.runtime.comm.world import World
from rannd.runtime.optim.coupling import NO_MASTERS, NOT_DIVIDED, Untried, check_offload, couples, divides
from rannd.runtime.optim.meta_state import check_settings, remake_state
from rannd.runtime.optim.placeholder import add_placeholder, is_placeholder, trains, without_placeholder
from rannd.runtime.optim.state_codec import Key, NamedState
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.zero.division import Bucket, Piece, divide
from rannd.runtime.zero.master_weights import HALF
from rannd.runtime.zero.sharded_step import ShardedStep
from rannd.runtime.zero.state_home import StateHome
from rannd.runtime.zero.state_pieces import cut

_HOME = "_rannd_whole"


class WholeOptimizer:
    """All parameters of an optimizer, and which of them this rank holds.

    RaNNCModule attaches one to its optimizer (`whole_optimizer`). Of another optimizer one tells the same, of a single
    process: every rank holds everything.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.optimizer = optimizer
        self.world = world
        self.groups: list[list[torch.Tensor]] = []
        """All parameters of each group, in the script's order."""
        self.group_names: list[list[str] | None] = []
        self._remember()
        self.members: list[Parameters] = []
        """The deployed models whose parameters it has."""
        self._places: dict[int, tuple[Parameters, str]] = {}
        self._elsewhere: set[int] = set()
        """Ids of the parameters that other ranks hold."""
        self.shared: list[tuple[Parameters, ShardedStep]] = []
        """What replicas of a stage share of the state of a deployed model's parameters (ZeRO), and master weights."""
        self._between: list[ShardedStep] = []
        """Master weights of models that are not deployed any more."""
        self.own_state_dict: Callable[[], dict[str, Any]] = optimizer.state_dict
        self.own_load_state_dict: Callable[[dict[str, Any]], None] = optimizer.load_state_dict
        self._own_add: Callable[[dict[str, Any]], None] = optimizer.add_param_group

    def attach(self) -> None:
        """Let the optimizer know of this object, and tell it of groups that are added later."""
        self.optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign]
        self.optimizer.__dict__[_HOME] = self

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, world: World) -> WholeOptimizer:
        """The one that is attached to an optimizer, else a new one."""
        found = optimizer.__dict__.get(_HOME)
        return found if isinstance(found, WholeOptimizer) else WholeOptimizer(optimizer, world)

    @staticmethod
    def is_attached(optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer was given to a RaNNCModule."""
        return _HOME in optimizer.__dict__

    @property
    def attached(self) -> bool:
        """Whether the optimizer was given to a RaNNCModule."""
        return self.optimizer.__dict__.get(_HOME) is self

    # -- who holds what ---------------------------------------------------------------------------------------

    def keep_own(self, parameters: Parameters) -> None:
        """Drop what other ranks hold of a model that is deployed now, groups and state. Alike on all ranks.

        State that the class's constructor made of parameters on the meta device is made again. A rank that is left
        without a parameter to train gets a placeholder.
        """
        check_settings(self.optimizer)
        trained = trains(self.optimizer)
        if not self.members:
            self._remember()
        everyone = set(range(self.world.size))
        by_id = {id(tensor): name for name, tensor in parameters.tensors.items()}
        mine = [p for group in self.optimizer.param_groups for p in group["params"]]
        if not any(id(parameter) in by_id for parameter in mine):
            raise UsageError(
                "the optimizer has none of the model's parameters any more: they were replaced after it was made "
                "(load_state_dict(assign=True), say); make the optimizer from the parameters as they are"
            )
        if any(set(parameters.slots[by_id[id(p)]]) != everyone for p in mine if id(p) in by_id):
            self._check_apart()
        self.members.append(parameters)
        self._places.update({number: (parameters, name) for number, name in by_id.items()})
        own = set(parameters.own)
        self._elsewhere |= {number for number, name in by_id.items() if name not in own}
        self._reduce()
        if trained and not trains(self.optimizer):
            add_placeholder(self.optimizer, self.world.device)

    def share(
        self,
        parameters: Parameters,
        slots: Sequence[int],
        segments: Mapping[str, tuple[int, ...]],
        *,
        masters: bool,
        home: StateHome | None = None,
        alone: bool = False,
    ) -> list[Bucket]:
        """Keep this rank's part alone of the state of parameters that `slots`, the replicas of its stage, hold.

        Args:
            parameters: Parameters of the deployed model.
            slots: The replicas of its stage; this rank's slot alone if nothing is shared.
            segments: What keeps parameters apart: the segments of the stage that read each; {}: nothing does.
            masters: Half-precision parameters have master weights.
            home: Where the state is between steps; None: where the optimizer puts it.
            alone: Divide parameters also if this rank is the only replica.

        Returns:
            The parameters that the replicas share.

        Raises:
            UsageError: The optimizer cannot step a part of a parameter.
        """
        if home is not None:
            check_offload(self.optimizer)
        if not divides(self.optimizer):
            message = NOT_DIVIDED if len(slots) > 1 or alone else NO_MASTERS
            raise UsageError(message.format(type(self.optimizer).__name__))
        while self._between:
            self._between.pop().close()
        mine = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        names = [
            name
            for name in parameters.trainable()
            if (len(slots) > 1 or alone)
            and id(parameters.tensors[name]) in mine
            and parameters.tensors[name].ndim  # see state_pieces.py
            and parameters.tensors[name].numel()
            and parameters.slots[name] == tuple(sorted(slots))
        ]
        wide = self._halves(parameters, parameters.own) if masters else []
        tensors = [(name, parameters.tensors[name]) for name in names]
        kinds = [(n, p.numel(), p.element_size(), f"{p.dtype} {segments.get(n, ())}") for n, p in tensors]
        buckets = divide(kinds, len(slots))
        if not any(bucket.is_shared_by_all for bucket in buckets):
            names, buckets = [], []
        if not buckets and not wide and home is None:
            return []
        sharded = ShardedStep(self.world, parameters, self.optimizer, slots, buckets, wide, home)
        self.shared.append((parameters, sharded))
        state = self.optimizer.state
        for name in names:
            tensor = parameters.tensors[name]
            if tensor in state:
                piece = sharded.pieces.get(name)
                whole = state.pop(tensor)
                if piece is not None:
                    state[tensor] = cut(whole, tensor.shape, piece)
        sharded.put_away()
        return buckets

    def _halves(self, parameters: Parameters, names: Sequence[str]) -> list[str]:
        """Those of a model's parameters that are the optimizer's, in half precision."""
        mine = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        tensors = parameters.tensors
        return [name for name in names if id(tensors[name]) in mine and tensors[name].dtype in HALF]

    def divided(self) -> int:
        """Number of the optimizer's parameters whose state this rank shares with others."""
        return sum(any(each.divides(p) for _, each in self.shared) for group in self.groups for p in group)

    def _piece(self, parameter: torch.Tensor) -> tuple[bool, Piece | None]:
        """Whether the state of a parameter is divided, and which elements this rank's is of."""
        for _, sharded in self.shared:
            if sharded.divides(parameter):
                return True, sharded.piece(parameter)
        return False, None

    def settle(self) -> None:
        """Put whole parameters into the groups, also after a step that raised an error."""
        for sharded in (*(sharded for _, sharded in self.shared), *self._between):
            sharded.settle()

    def begin_call(self) -> None:
        """Called before each call of a model whose parameters it has."""
        for _, sharded in self.shared:
            sharded.begin_call()

    def _check_apart(self) -> None:
        """UsageError if a step needs parameters that this rank will not have; a warning where that cannot be told."""
        kind = type(self.optimizer).__name__
        try:
            coupled = couples(self.optimizer)
        except Untried as exc:
            if self.world.rank == 0:
                log.get("RaNNCModule").warning(
                    "The plan gives each rank's optimizer only the parameters of its stages. Whether %s updates each "
                    "parameter by itself could not be tried (%s). If an update depends on other parameters, as on the "
                    "norm of all gradients in SAM, its results are wrong: set partition_num=1",
                    kind,
                    exc,
                )
            return
        if coupled:
            raise UsageError(
                f"{kind} looks at all parameters at once, but this plan gives ranks only some of them; use another "
                "optimizer, or partition_num=1"
            )

    def forget(self, parameters: Parameters) -> None:
        """Give the groups a model's parameters back, once they are whole again. Other ranks' state is not here."""
        self.members.remove(parameters)
        shared = self.shared
        for held, sharded in shared:
            if held is parameters:
                sharded.close()
                for parameter in parameters.tensors.values():
                    if sharded.divides(parameter):
                        self.optimizer.state.pop(parameter, None)
        self.shared = [each for each in shared if each[0] is not parameters]
        gone = {id(tensor) for tensor in parameters.tensors.values()}
        for placeholder in [key for key in self.optimizer.state if is_placeholder(key)]:
            del self.optimizer.state[placeholder]
        self._places = {number: place for number, place in self._places.items() if number not in gone}
        self._elsewhere -= gone
        for group, whole, names in zip(self.optimizer.param_groups, self.groups, self.group_names, strict=True):
            group["params"][:] = [parameter for parameter in whole if self.holds(parameter)]
            if names is not None:
                group["param_names"] = [n for n, p in zip(names, whole, strict=True) if self.holds(p)]
        if any(held is parameters and sharded.masters for held, sharded in shared):
            wide = self._halves(parameters, list(parameters.tensors))
            self._between.append(ShardedStep(self.world, parameters, self.optimizer, (self.world.slot,), (), wide))

    def give(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Put what belongs to parameters that were elsewhere into the optimizer's state, and all where it belongs."""
        for group in self.optimizer.param_groups:
            on_device = bool(group.get("fused") or group.get("capturable"))
            for parameter in group["params"]:
                if parameter in states:
                    state = self.optimizer.state.get(parameter) or states[parameter]
                    self.optimizer.state[parameter] = _moved(state, parameter.device, on_device)

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether this rank has a parameter; what belongs to no deployed model is on all ranks."""
        return id(parameter) not in self._elsewhere

    def elsewhere(self) -> int:
        """Number of the optimizer's parameters that this rank does not have."""
        return sum(not self.holds(parameter) for group in self.groups for parameter in group)

    @property
    def in_parts(self) -> bool:
        """Whether some rank lacks a parameter that it has, or a part of its state; the same on all ranks."""
        everyone = set(range(self.world.size))
        apart = any(set(held.slots[name]) != everyone for held, name in self._places.values())
        return apart or bool(self.divided())

    def is_own(self, state: Any) -> bool:
        """Whether a state has this rank's parameters alone, and not all."""
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if not isinstance(groups, list) or not self.elsewhere():
            return False
        return [len(each.get("params", ())) for each in groups] == list(map(len, self._held()))

    def writer(self, parameter: torch.Tensor) -> int:
        """The rank that saves a parameter's state."""
        place = self._places.get(id(parameter))
        return 0 if place is None else place[0].writers[place[1]]

    def place(self, parameter: torch.Tensor) -> tuple[int, str] | None:
        """(number of the model, name in it); None for what belongs to no deployed model."""
        place = self._places.get(id(parameter))
        return None if place is None else (self.members.index(place[0]), place[1])

    def _name(self, parameter: torch.Tensor) -> str:
        place = self._places.get(id(parameter))
        return "a parameter" if place is None else place[1]

    # -- its state, by keys of parameters ---------------------------------------------------------------------

    def named_state(self, keys: Sequence[Sequence[Key]]) -> NamedState[Key]:
        """This rank's part of the state; `keys` are those of all parameters of each group.

        The groups have all parameters, but their settings only on rank 0. Of a parameter that several ranks hold, one
        of them has the state; where they share it, each has that of its piece.
        """
        self.settle()
        held, rank = self.held_keys(keys), self.world.rank
        part = NamedState.of(self.own_state_dict(), held)
        groups = zip(held, self._held(), strict=True)
        mine: set[Key] = set()
        for names, group in groups:
            for key, parameter in zip(names, group, strict=True):
                divided, piece = self._piece(parameter)
                if piece is not None:
                    part.pieces[key] = piece.start, piece.stop
                if piece is not None or (not divided and self.writer(parameter) == rank):
                    mine.add(key)
        part.states = {key: state for key, state in part.states.items() if key in mine}
        settings = part.groups if rank == 0 else [{} for _ in part.groups]
        part.groups = [{**each, **named} for each, named in zip(settings, self.named_groups(keys), strict=True)]
        return part

    def part_of(self, state: NamedState[Key], keys: Sequence[Sequence[Key]]) -> NamedState[Key]:
        """What this rank keeps of whole states; `keys` are those of all parameters of each group."""
        found: dict[Key, Any] = {}
        for names, group in zip(self.held_keys(keys), self._held(), strict=True):
            for key, parameter in zip(names, group, strict=True):
                divided, piece = self._piece(parameter)
                if key in state.states and (piece is not None or not divided):
                    whole = state.states[key]
                    found[key] = whole if piece is None else cut(whole, parameter.shape, piece)
        return NamedState(state.groups, found, state.other, state.extra)

    def needed_keys(self, keys: Sequence[Sequence[Key]]) -> set[Key]:
        """The keys of the parameters of whose state this rank keeps anything."""
        found = set()
        for names, group in zip(self.held_keys(keys), self._held(), strict=True):
            for key, parameter in zip(names, group, strict=True):
                divided, piece = self._piece(parameter)
                if piece is not None or not divided:
                    found.add(key)
        return found

    def named_groups(self, keys: Sequence[Sequence[Key]]) -> list[dict[str, Any]]:
        """The groups of a NamedState, without settings."""
        return [
            {"params": list(names)} if labels is None else {"params": list(names), "param_names": labels}
            for names, labels in zip(keys, self.group_names, strict=True)
        ]

    def held_keys(self, keys: Sequence[Sequence[Key]]) -> list[list[Key]]:
        """The keys of the parameters that this rank has, of those of all parameters of each group."""
        key = {
            id(parameter): name
            for group, names in zip(self.groups, keys, strict=True)
            for parameter, name in zip(group, names, strict=True)
        }
        return [[key[id(parameter)] for parameter in group] for group in self._held()]

    def _held(self) -> list[list[torch.Tensor]]:
        self.settle()
        return [without_placeholder(group) for group in self.optimizer.param_groups]

    # -- changes of the groups --------------------------------------------------------------------------------

    def check_groups(self) -> str:
        """'' or what the script has done to the groups that makes them untellable."""
        self.settle()
        groups = self.optimizer.param_groups
        if len(groups) != len(self.groups):
            return f"the optimizer has {len(groups)} groups, {len(self.groups)} were made by it; use add_param_group"
        for number, (group, whole) in enumerate(zip(groups, self.groups, strict=True)):
            held = [id(parameter) for parameter in whole if self.holds(parameter)]
            if [id(parameter) for parameter in without_placeholder(group)] != held:
                return f"the parameters of the optimizer's group {number} were changed by hand; use add_param_group"
        return ""

    def _remember(self) -> None:
        groups = self.optimizer.param_groups
        self.groups = [list(group["params"]) for group in groups]
        self.group_names = [list(group["param_names"]) if "param_names" in group else None for group in groups]

    def _reduce(self) -> None:
        optimizer = self.optimizer
        for group in optimizer.param_groups:
            if "param_names" in group:
                named = zip(group["param_names"], without_placeholder(group), strict=True)
                group["param_names"] = [name for name, parameter in named if self.holds(parameter)]
            group["params"][:] = [parameter for parameter in group["params"] if self.holds(parameter)]
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    if not parameter.is_meta:
                        remake_state(optimizer, group, parameter, self._name(parameter))
                    on_device = bool(group.get("fused") or group.get("capturable"))
                    optimizer.state[parameter] = _moved(optimizer.state[parameter], self.world.device, on_device)
        for parameter in [key for key in optimizer.state if isinstance(key, torch.Tensor)]:
            if not self.holds(parameter):
                del optimizer.state[parameter]

    def _add_param_group(self, param_group: dict[str, Any]) -> None:
        """The class's own; a rank keeps those of the new parameters that it holds. On every rank, alike."""
        self._own_add(param_group)
        added = self.optimizer.param_groups[-1]
        self.groups.append(list(added["params"]))
        self.group_names.append(list(added["param_names"]) if "param_names" in added else None)
        self._reduce()


def _moved(value: Any, device: torch.device, scalars: bool) -> Any:
    """A parameter's state on its parameter's device; numbers in tensors (`step`) only where the class wants it."""
    if isinstance(value, torch.Tensor):
        return value.to(device) if (value.ndim or scalars) and value.device != device else value
    if isinstance(value, dict):
        for key in value:
            value[key] = _moved(value[key], device, scalars)
    elif isinstance(value, list):
        value[:] = [_moved(each, device, scalars) for each in value]
    elif type(value) is tuple:
        return tuple(_moved(each, device, scalars) for each in value)
    return value
