"""What this rank writes into a checkpoint: values by their names in the index (model, extra state, optimizer)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.averaged_model import AveragedModel
from rannd.runtime.comm.world import World
from rannd.runtime.optim.local_optimizer import WholeOptimizer
from rannd.runtime.optim.state_codec import NamedState, TensorName, copied
from rannd.runtime.parameters.absent import part_of
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.parameters.state_dict import persistent_names
from rannd.runtime.storage.dcp_files import PartOf
from rannd.runtime.storage.sealing import seal
from rannd.runtime.zero.division import Piece
from rannd.runtime.zero.flat_boxes import boxes
from rannd.runtime.zero.state_pieces import is_part
from rannd.runtime.zero.tensor_piece import TensorPiece

MODEL = "model."
AVERAGED = "averaged"
EXTRA = torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def dotted(path: tuple[Any, ...]) -> str:
    """The name in the index of what has this place in nested dicts."""
    return ".".join(map(str, path))


@dataclass
class Content:
    """Values that this rank writes, by their names in the index."""

    values: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """Where values belong in nested dicts, for plain readers."""
    parts: dict[str, PartOf] = field(default_factory=dict)
    """What is only a part of a tensor, which other ranks write as well, by its key in `values`."""

    def put(self, path: tuple[Any, ...], value: Any) -> str:
        """Add a value; its name is its path, with dots."""
        name = dotted(path)
        if name in self.values:
            raise UsageError(f"two values of the checkpoint would have the name {name}; rename one of the parameters")
        self.values[name] = value
        self.paths[name] = path
        return name

    def put_pieces(self, path: tuple[Any, ...], flat: torch.Tensor, piece: Piece, shape: Sequence[int]) -> None:
        """Add a range of the elements of a tensor of `shape`, `flat`."""
        name, begin = dotted(path), 0
        for offsets, sizes in boxes(shape, *piece):
            key, count = f"{name}@{','.join(map(str, offsets))}", math.prod(sizes)
            self.values[key] = flat[begin : begin + count].view(sizes)
            self.parts[key] = PartOf(name, list(offsets), list(shape))
            begin += count
        self.paths[name] = path

    def snapshot(self) -> None:
        """Copy all tensors to the CPU."""
        self.values = {name: copied(value) for name, value in self.values.items()}


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer of a model's state, under all its names."""

    tensor: torch.Tensor
    names: list[str]
    writer: int
    """The rank that saves it."""
    first: int
    """The first rank that holds it."""
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
            found[id(tensor)] = Tensor(tensor, [], 0, 0, True)
            if parameters is not None:
                first = parameters.names[name]
                holder = world.rank_of_slot[parameters.slots[first][0]]
                found[id(tensor)] = Tensor(tensor, [], parameters.writers[first], holder, first in own)
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
        holders[id(each.tensor)] = each.first
        held = part_of(each.tensor)
        if each.writer != world.rank and not (each.held and held is not None):
            continue
        if each.tensor.is_meta or each.tensor.layout is not torch.strided:
            kind = "on the meta device" if each.tensor.is_meta else f"a {each.tensor.layout} tensor"
            hint = "; a RaNNCModule has them once it was called" if each.tensor.is_meta else ""
            raise UsageError(f"{each.names[0]} is {kind}; a checkpoint holds dense tensors that have values{hint}")
        first, *others = each.names
        name = dotted((*home, first))
        if held is None:
            content.put((*home, first), each.tensor.detach())
        else:
            assert isinstance(held, TensorPiece)
            content.put_pieces((*home, first), held.flat, held.piece, held.shape)
        content.aliases[name] = [".".join((*home, other)) for other in others]
        content.paths.update({".".join((*home, other)): (*home, other) for other in others})
    for name, module in extra_states(model).items():
        tensors = [*module.parameters(), *module.buffers()]
        if next((holders[id(each)] for each in tensors if id(each) in holders), 0) == world.rank:
            state = copied(module.get_extra_state())
            seal(state, f"the extra state {name}")
            content.put((*home, name), state)


def average_name(name: str) -> tuple[str, ...]:
    """Where the average of a tensor belongs in the nested dict that the checkpoint is."""
    return (AVERAGED, name)


def put_averages(content: Content, world: World, parameters: Parameters | None, averaged: AveragedModel) -> None:
    """Add the averages that this rank writes."""
    for name, value in averaged.held().items():
        writer = 0 if parameters is None else parameters.writers[name]
        if isinstance(value, TensorPiece):
            content.put_pieces(average_name(name), value.flat, value.piece, value.shape)
        elif writer == world.rank:
            content.put(average_name(name), value.detach())


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """What a checkpoint says of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def parameter_names(whole: WholeOptimizer, model: nn.Module) -> list[list[str]]:
    """Names of all parameters of the optimizer's groups; '@GROUP.PLACE' for one that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        [names.get(id(parameter), f"@{number}.{place}") for place, parameter in enumerate(group)]
        for number, group in enumerate(whole.groups)
    ]


def state_name(name: TensorName) -> tuple[Any, ...]:
    """Where a tensor of the optimizer's state belongs in the nested dict that the checkpoint is."""
    return ("optimizer", "state", *name)


def put_optimizer(content: Content, whole: WholeOptimizer, model: nn.Module) -> NamedState[str]:
    """Add the tensors that this rank writes of the optimizer's state; returns the skeleton of this rank's part."""
    keys = parameter_names(whole, model)
    skeleton, tensors = whole.named_state(keys).split()
    shapes: dict[str, torch.Size] = {}
    for names, group in zip(keys, whole.groups, strict=True):
        shapes.update(zip(names, (parameter.shape for parameter in group), strict=True))
    for name, tensor in tensors.items():
        piece = Piece(*skeleton.pieces[name[0]]) if name[0] in skeleton.pieces else None
        if piece is not None and is_part(tensor, piece):
            content.put_pieces(state_name(name), tensor.detach(), piece, shapes[name[0]])
        elif piece is None or piece.start == 0:  # other ranks have it, too
            content.put(state_name(name), tensor.detach())
    if whole.world.rank == 0:
        for number, settings in enumerate(skeleton.groups):
            for key, value in settings.items():
                if key != "param_names":
                    seal(value, f"setting {key} of the optimizer's group {number}")
                    content.put(("optimizer", "param_groups", number, key), value)
    return skeleton
