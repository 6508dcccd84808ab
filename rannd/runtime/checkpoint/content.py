"""What goes into a checkpoint from this rank: names of tensors, and which of them this rank writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.comm.gather_objects import seal
from rannd.runtime.comm.world import World
from rannd.runtime.optim.local_optimizer import WholeOptimizer
from rannd.runtime.optim.optimizer_state import MARK, copied, hollowed
from rannd.runtime.optim.placeholder import without_placeholder
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.parameters.state_dict import persistent_names

MODEL = "model."
OPTIMIZER = "optimizer."
EXTRA = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


@dataclass
class Content:
    """Values that this rank writes, by their names in the index."""

    values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Where values belong in nested dicts, for plain readers."""

    def put(self, path: tuple[Any, ...], value: Any) -> str:
        """Add a value; its name is its path, with dots."""
        name = ".".join(map(str, path))
        if name in self.values:
            raise UsageError(f"two values of the checkpoint would have the name {name}; rename one of the parameters")
        self.values[name] = value
        self.paths[name] = path
        return name

    def snapshot(self) -> None:
        """Copy all tensors to the CPU."""
        self.values = {name: copied(value) for name, value in self.values.items()}


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer of a model's state, under all its names."""

    tensor: torch.Tensor
    names: list[str]
    holder: int
    held: bool


def state_tensors(world: World, parameters: Parameters | None, model: nn.Module) -> list[Tensor]:
    """All tensors of a model's state, once each; their names in the model's order. The same on all ranks."""
    wanted = persistent_names(model)
    found: dict[int, Tensor] = {}
    own = set(parameters.own) if parameters is not None else set()
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        if name not in wanted:
            continue
        if id(tensor) not in found:
            holder, held = 0, True
            if parameters is not None:
                first = parameters.names[name]
                holder, held = world.rank_of_slot[parameters.slots[first][0]], first in own
            found[id(tensor)] = Tensor(tensor, [], holder, held)
        found[id(tensor)].names.append(name)
    return list(found.values())


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with extra state, by its name in the model's state."""
    return {
        f"{path}.{EXTRA}" if path else EXTRA: module
        for path, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def put_model(content: Content, world: World, parameters: Parameters | None, model: nn.Module, prefix: str) -> None:
    """Add what this rank writes of the model."""
    home = tuple(prefix.removesuffix(".").split(".")) if prefix else ()
    holders: dict[int, int] = {}
    for each in state_tensors(world, parameters, model):
        holders[id(each.tensor)] = each.holder
        if each.holder != world.rank:
            continue
        if each.tensor.is_meta or each.tensor.layout is not torch.strided:
            kind = "on the meta device" if each.tensor.is_meta else f"a {each.tensor.layout} tensor"
            hint = "; a RaNNCModule has them once it was called" if each.tensor.is_meta else ""
            raise UsageError(f"{each.names[0]} is {kind}; a checkpoint holds dense tensors that have values{hint}")
        first, *others = each.names
        name = content.put((*home, first), each.tensor.detach())
        content.aliases[name] = [".".join((*home, other)) for other in others]
        content.paths.update({".".join((*home, other)): (*home, other) for other in others})
    for name, module in extra_states(model).items():
        tensors = [*module.parameters(), *module.buffers()]
        if next((holders[id(each)] for each in tensors if id(each) in holders), 0) == world.rank:
            state = module.get_extra_state()
            seal(state, f"the extra state {name}")
            content.put((*home, name), copied(state))


def labels(optimizer: torch.optim.Optimizer, whole: WholeOptimizer | None, model: nn.Module) -> list[list[str]]:
    """Names of the parameters in the optimizer's whole groups; '@GROUP.PLACE' for what is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = whole.groups if whole is not None else [group["params"] for group in optimizer.param_groups]
    return [
        [names.get(id(parameter), f"@{number}.{place}") for place, parameter in enumerate(group)]
        for number, group in enumerate(groups)
    ]


def put_optimizer(
    content: Content, rank: int, optimizer: torch.optim.Optimizer, whole: WholeOptimizer | None, model: nn.Module
) -> dict[str, Any]:
    """Add the tensors that this rank writes of the optimizer's state; returns the outline of all the rest."""
    told = labels(optimizer, whole, model)
    groups = whole.groups if whole is not None else [group["params"] for group in optimizer.param_groups]
    label = {
        id(parameter): name
        for group, names in zip(groups, told, strict=True)
        for parameter, name in zip(group, names, strict=True)
    }
    packed = whole.own_state_dict() if whole is not None else optimizer.state_dict()
    held = [parameter for group in optimizer.param_groups for parameter in without_placeholder(group)]
    states: dict[str, Any] = {}
    other: dict[Any, Any] = {}
    for index, value in packed["state"].items():
        if not isinstance(index, int) or not 0 <= index < len(held):
            other[index] = copied(value)
            continue
        holder = whole.holder(held[index]) if whole is not None else 0
        if holder != rank:
            continue
        name = label[id(held[index])]
        places: list[tuple[tuple[Any, ...], torch.Tensor]] = []
        states[name] = hollowed(value, places, small=-1)
        for path, tensor in places:
            content.put(("optimizer", "state", name, *path), tensor.detach())
    settings = [
        {key: copied(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in packed["param_groups"]
    ]
    if rank == 0:
        for number, (setting, names) in enumerate(zip(settings, told, strict=True)):
            for key, value in {**setting, "params": names}.items():
                seal(value, f"setting {key} of the optimizer's group {number}")
                content.put(("optimizer", "param_groups", number, key), value)
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        "groups": [[(0, name) for name in names] for names in told],
        "names": whole.group_names
        if whole is not None
        else [list(g["param_names"]) if "param_names" in g else None for g in optimizer.param_groups],
        "settings": settings if rank == 0 else [],
        "states": states,
        "other": other,
        "extra": {key: copied(value) for key, value in packed.items() if key not in ("state", "param_groups")},
    }


def state_names(name: str, skeleton: Any) -> list[str]:
    """Names, in the index, of the tensors of one parameter's state, in the order of their marks."""
    found: list[tuple[Any, ...]] = []
    marks(skeleton, (), found)
    return [".".join(map(str, ("optimizer", "state", name, *path))) for path in found]


def marks(skeleton: Any, path: tuple[Any, ...], found: list[tuple[Any, ...]]) -> None:
    """Paths of the tensors of a skeleton, in order."""
    if isinstance(skeleton, Mapping):
        if set(skeleton) == {MARK}:
            found.append(path)
            return
        for key, each in skeleton.items():
            marks(each, (*path, key), found)
    elif type(skeleton) in (list, tuple):
        for place, each in enumerate(skeleton):
            marks(each, (*path, place), found)
