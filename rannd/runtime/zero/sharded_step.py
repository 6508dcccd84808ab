"""An optimizer that steps this rank's pieces of parameters only, and gathers the others' values after each step.

Where there are master weights, it steps these instead of half-precision parameters or their pieces.

Between steps the optimizer's groups have whole parameters with whole gradients, so that scripts, GradScaler and
clipping see nothing of it; its state of a parameter is that of this rank's piece. A step looks like this::

    before   groups: parameters  ──►  pieces of them, sharing their memory (or float32 copies), with pieces of gradients
    step     of the class, on the pieces
    after    groups: parameters again, with the copies' values; each replica's pieces go to the others

With `offload_optimizer` a step is one of the class for each bucket of parameters, whose state is brought before it and
put away after it. The script's hooks see one: all but the last bucket are stepped by the hook before it (or behind the
closure), with the class's step as it is without hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.comm.world import World
from rannd.runtime.parameters.absent import part_of
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.zero.division import MOST, Bucket, Piece
from rannd.runtime.zero.master_weights import MASTER, take_master, widen_gradient
from rannd.runtime.zero.replica_exchange import ReplicaExchange
from rannd.runtime.zero.state_home import StateHome
from rannd.runtime.zero.tensor_piece import TensorPiece, flat_part


class ShardedStep:
    """Steps of an optimizer on the pieces that this rank owns of a deployed model's parameters.

    Args:
        world: The ranks of the job.
        parameters: Parameters of the deployed model.
        optimizer: The optimizer.
        slots: The replicas of this rank's stage.
        buckets: Parameters to divide: of the optimizer, and held by these replicas alone.
        masters: Parameters of the optimizer that have master weights, divided or not.
        home: Where the state is between steps; None: where the optimizer puts it.
    """

    def __init__(
        self,
        world: World,
        parameters: Parameters,
        optimizer: torch.optim.Optimizer,
        slots: Sequence[int],
        buckets: Sequence[Bucket],
        masters: Sequence[str] = (),
        home: StateHome | None = None,
    ) -> None:
        self._world = world
        self._optimizer = optimizer
        self._gathering = ReplicaExchange(world, slots)
        self._buckets = buckets
        self._tensors = {name: parameters.tensors[name] for bucket in buckets for name in bucket.names}
        self.pieces: dict[str, Piece] = {}
        """What this rank owns, by name; a parameter of which it owns nothing is left out."""
        self._pieces_of = {each: [each.pieces(replica) for replica in range(each.replicas)] for each in buckets}
        """What every replica owns of each bucket."""
        for every in self._pieces_of.values():
            self.pieces |= every[self._gathering.replica]
        self.masters = frozenset(masters)
        self._stepped = {**self._tensors, **{name: parameters.tensors[name] for name in masters}}
        """Parameters in whose place the optimizer steps a part."""
        self.home = home
        names = self._stepped if home is None else {name: parameters.tensors[name] for name in parameters.own}
        self._name = {id(tensor): name for name, tensor in names.items()}
        self._parts: dict[str, nn.Parameter] = {}
        self._before: list[list[Any]] = []
        """The groups' parameters while the optimizer steps."""
        self._swapped: dict[str, nn.Parameter] = {}
        """What it steps in place of parameters."""
        self._bucket: list[torch.Tensor] = []
        """Parameters whose state is here, where it is elsewhere between steps."""
        self._inside = False
        """All buckets but the last are being stepped."""
        for tensor in self._tensors.values():
            tensor.data = tensor.data.contiguous()
        for name in masters:
            widen_gradient(self._stepped[name])
        self.stepped: list[Callable[[], None]] = []
        """Called after each step."""
        self._handles = (
            optimizer.register_step_pre_hook(self._enter),
            optimizer.register_step_post_hook(self._leave),
        )
        # The script's hooks behind a step see whole parameters.
        _reorder(optimizer._optimizer_step_post_hooks, self._handles[1].id, last=False)

    def put_away(self) -> None:
        """Put all state that there is where it is between steps."""
        if self.home is not None:
            for bucket in self._in_buckets():
                self._keep(bucket)
            self.home.finish()

    def divides(self, parameter: torch.Tensor) -> bool:
        """Whether the replicas share this parameter."""
        return self._name.get(id(parameter)) in self._tensors

    def piece(self, parameter: torch.Tensor) -> Piece | None:
        """What this rank owns of a parameter that is shared; None if nothing."""
        return self.pieces.get(self._name[id(parameter)])

    def close(self) -> None:
        """Step whole parameters again; state is with them. That of those that were shared is not joined."""
        self.settle()
        if self.home is not None:
            for parameter in (each for bucket in self._in_buckets() for each in bucket):
                self.home.restore(self._name[id(parameter)], self._optimizer.state.get(parameter, {}))
        for handle in self._handles:
            handle.remove()

    def begin_call(self) -> None:
        """See to it that the script's hooks before a step see whole parameters, also those that are new."""
        self.settle()
        _reorder(self._optimizer._optimizer_step_pre_hooks, self._handles[0].id, last=True)

    # -- a step -----------------------------------------------------------------------------------------------

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._inside:
            raise UsageError(
                f"offload_optimizer: the step of {type(self._optimizer).__name__} calls that of its base class, with "
                "all hooks; set offload_optimizer=false, or use another optimizer"
            )
        plain = tuple(None if _is_closure(each) else each for each in args)
        named = {key: None if _is_closure(value) else value for key, value in kwargs.items()}
        if any(map(_is_closure, (*args, *kwargs.values()))):
            # The closure puts whole parameters back, and goes on as below.
            self._swap(None if self.home is None else [], others=self.home is None)
        else:
            self._begin(plain, named)
        called: list[None] = []

        def outside(value: Any) -> Any:
            if not _is_closure(value):
                return value

            def closure(*given: Any, **more: Any) -> Any:
                # It runs forward and backward inside of the step, and sees whole parameters, too.
                if called and self.home is not None:
                    raise UsageError(
                        f"offload_optimizer: {type(self._optimizer).__name__} calls its closure more than once in a "
                        "step; set offload_optimizer=false, or use another optimizer"
                    )
                called.append(None)
                self.settle()
                found = value(*given, **more)
                self._begin(plain, named)
                return found

            return closure

        return tuple(map(outside, args)), {key: outside(value) for key, value in kwargs.items()}

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Step all buckets but the last, and swap that one's parameters for what is stepped; without buckets, all."""
        self.settle()
        if self.home is None:
            self._swap()
            return
        step = type(self._optimizer).step
        step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        buckets = self._in_buckets()
        self._inside = True
        try:
            for number, bucket in enumerate(buckets[:-1]):
                self._bring(bucket, buckets[number + 1])
                self._swap(bucket, others=False)
                step(*args, **kwargs)
                self._put_back()
            if buckets:
                self._bring(buckets[-1], [])
            self._swap([each for bucket in buckets[:-1] for each in bucket], others=True)
        finally:
            self._inside = False

    def _in_buckets(self) -> list[list[torch.Tensor]]:
        """The optimizer's parameters that are this model's: those whose state is here at a time."""
        buckets: list[list[torch.Tensor]] = []
        room = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = self._name.get(id(parameter))
                if name is None or (name in self._tensors and name not in self.pieces):
                    continue
                size = self._size(name, parameter) * parameter.element_size()
                if not buckets or size > room:
                    buckets.append([])
                    room = MOST
                buckets[-1].append(parameter)
                room -= size
        return buckets

    def _size(self, name: str, parameter: torch.Tensor) -> int:
        """Number of elements that are stepped of a parameter."""
        return self.pieces[name].size if name in self.pieces else parameter.numel()

    def _bring(self, bucket: Sequence[torch.Tensor], following: Sequence[torch.Tensor]) -> None:
        assert self.home is not None
        self._bucket = list(bucket)
        self.home.bring(*self._states(bucket))
        self.home.ahead(*self._states(following))

    def _states(self, bucket: Sequence[torch.Tensor]) -> tuple[list[str], list[dict[str, Any]]]:
        there = [each for each in bucket if each in self._optimizer.state]
        return [self._name[id(each)] for each in there], [self._optimizer.state[each] for each in there]

    def _keep(self, bucket: Sequence[torch.Tensor]) -> None:
        assert self.home is not None
        names, states = self._states(bucket)
        for name, state, parameter in zip(
            names, states, (p for p in bucket if p in self._optimizer.state), strict=True
        ):
            self.home.keep(name, state, self._size(name, parameter))
        self.home.leave(names)

    def _leave(self, *_: Any) -> None:
        if self._before:
            self.settle()
            if self._buckets:
                self._gather()
            for call in self.stepped:
                call()

    def _swap(self, some: Collection[torch.Tensor] | None = None, *, others: bool = True) -> None:
        """Put this rank's pieces in the place of parameters, in the groups and in the state.

        `some`: the groups get these alone, or (`others`) all but these.
        """
        state = self._optimizer.state
        chosen = {id(each) for each in some or ()}
        for group in self._optimizer.param_groups:
            held = list(group["params"])
            self._before.append(held)
            swapped: list[Any] = []
            for parameter in held:
                if (id(parameter) in chosen) == others:
                    continue
                if not parameter.is_contiguous():  # the script gave it other memory
                    parameter.data = parameter.data.contiguous()
                name = self._name.get(id(parameter))
                if name not in self._stepped or (
                    name in self.masters and parameter.grad is None and parameter not in state
                ):
                    swapped.append(parameter)  # the latter is not stepped, and needs no copy
                elif name in self.pieces or name not in self._tensors:
                    kept = state.pop(parameter, None)
                    part = self._part(name, parameter, {} if kept is None else kept)
                    if kept is not None:
                        state[part] = kept
                    self._swapped[name] = part
                    swapped.append(part)
            group["params"][:] = swapped

    def settle(self) -> None:
        """Put whole parameters back, also after a step that has raised an error; state goes where it is kept."""
        if self._before:
            self._put_back()
            if self.home is not None:
                self.home.finish()

    def _put_back(self) -> None:
        before, self._before = self._before, []
        state = self._optimizer.state
        for group, held in zip(self._optimizer.param_groups, before, strict=False):
            group["params"][:] = held
        rounded: list[torch.Tensor] = []
        """What gets the values of copies that were stepped: of masters, and of what is elsewhere (`offload_params`)."""
        masters: list[torch.Tensor] = []
        for name, part in self._swapped.items():
            part.grad = None
            parameter = self._stepped[name]
            if part in state:
                state[parameter] = state.pop(part)
            own = self._own(name, parameter)
            if name in self.masters:
                state[parameter][MASTER] = part.data
            if name in self.masters or own.device != part.device:
                rounded.append(own)
                masters.append(part.data)
        self._swapped = {}
        if masters:
            torch._foreach_copy_(rounded, masters)
        if any(own.device != stepped.device for own, stepped in zip(rounded, masters, strict=True)):
            self._parts.clear()  # copies of what is elsewhere: the device's memory
        if self.home is not None:
            bucket, self._bucket = self._bucket, []
            self._keep(bucket)
            if not self.home.in_place:
                self._parts.clear()  # of masters: the device's memory

    def _own(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a parameter or its gradient, or all of one that is not divided; shares its memory."""
        held = tensor if isinstance(tensor, TensorPiece) else part_of(tensor)
        if held is not None:
            return flat_part(held)
        if name not in self._tensors:
            return tensor.detach()
        piece = self.pieces[name]
        return tensor.detach().reshape(-1)[piece.start : piece.stop]

    def _part(self, name: str, parameter: torch.Tensor, state: dict[str, Any]) -> nn.Parameter:
        """What is stepped in place of a parameter, with its gradient: a piece that shares memory, or its master."""
        own = self._own(name, parameter).to(parameter.device)
        part = self._parts.get(name)
        if name in self.masters:
            part = take_master(own, part, state)
        elif part is None or part.data_ptr() != own.data_ptr():
            part = nn.Parameter(own)
        self._parts[name] = part
        part.requires_grad_(parameter.requires_grad)
        gradient = parameter.grad
        part.grad = None if gradient is None else self._own(name, gradient).to(part.dtype)
        return part

    def _gather(self) -> None:
        """Send this rank's pieces to the other replicas, and receive theirs. Collective."""
        with self._world.watch.inside("optimizer.step"):
            self._exchange()

    def _exchange(self) -> None:
        works = []
        for bucket in self._buckets:
            first = self._tensors[bucket.names[0]]
            if part_of(first) is not None:
                continue  # whole parameters are gathered where they are needed
            size = sum(bucket.sizes)
            total = size if self._gathering.uneven else bucket.length * bucket.replicas
            inside = len(bucket.names) == 1 and total == size
            flat = first.detach().view(-1) if inside else first.new_empty(total, requires_grad=False)
            if not inside:
                self._copy(bucket, flat, self._gathering.replica, out=True)
            works.append((bucket, flat, inside, self._gathering.gather(flat, bucket.length)))
        for bucket, flat, inside, work in works:
            work.wait()
            if not inside:
                for replica in range(bucket.replicas):
                    if replica != self._gathering.replica:
                        self._copy(bucket, flat, replica, out=False)

    def _copy(self, bucket: Bucket, flat: torch.Tensor, replica: int, *, out: bool) -> None:
        """Copy a replica's pieces out of the parameters, or into them."""
        pieces = self._pieces_of[bucket][replica]
        here, there, begin = [], [], replica * bucket.length
        for name, piece in pieces.items():
            here.append(self._tensors[name].detach().view(-1)[piece.start : piece.stop])
            there.append(flat[begin : begin + piece.size])
            begin += piece.size
        if here:
            torch._foreach_copy_(*((there, here) if out else (here, there)))


def _reorder(hooks: Any, number: int, *, last: bool) -> None:
    """Move one of an optimizer's hooks to the end, or to the begin; torch keeps them in an OrderedDict."""
    hooks.move_to_end(number, last=last)


def _is_closure(value: Any) -> bool:
    return callable(value) and not isinstance(value, torch.optim.Optimizer)
