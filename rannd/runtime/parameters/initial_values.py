"""Initial values of a model's parameters and buffers: find their source, and materialize them on the ranks.

A tensor with memory already has values; ranks that hold it take rank 0's. A tensor on the meta device is materialized
only on the ranks that hold it, from the first available source of:

1. the checkpoint passed to RaNNCModule or loaded since (it also replaces existing values);
2. rank 0, if the tensor has values there (a model that only rank 0 has built);
3. its constructor, recorded under DistributeModelParams;
4. the initialization method of its module's class.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import torch
from torch import nn

from rannd import log
from rannd.daemon.common.printable import plain
from rannd.device.generators import kept_generators
from rannd.errors import CheckpointError, RanndError, TraceError, UsageError
from rannd.profile.out_of_memory import is_out_of_memory
from rannd.runtime.comm.context import Context
from rannd.runtime.comm.gather_objects import agree_on_errors
from rannd.runtime.parameters.deferred_init import Recipe, check_unchanged, draw_seed, forget, recipes_of, recorders_of
from rannd.runtime.parameters.op_tape import Unrepeatable
from rannd.runtime.parameters.reset_parameters import record_initialisation
from rannd.runtime.parameters.tensor_swap import bare, give, others, plain_tensors, unwritten
from rannd.runtime.storage.weight_files import Weights, match, open_weights

MOST_NAMES = 5
"""Maximum number of names in one message."""
ADVICE = (
    "give RaNNCModule(checkpoint=...) a file that has it, define reset_parameters() in the module's class, or build "
    "the model under pyrannc.DistributeModelParams() in place of torch.device('meta')"
)


class InitialValues:
    """The values of one model, until it is deployed. Making it, and all methods that say so, are collective."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._world = world = context.world
        self._sync = context.options.sync
        self._given: dict[str, tuple[Weights, str]] = {}
        """(checkpoint, name in it) of tensors, by first name."""
        self._finish: Callable[[], None] | None = None
        self._own: dict[str, Recipe] = {}
        """Recorded initialization methods of tensors, by first name."""
        self._constructed: dict[str, Recipe] = {}
        """Recorded constructors (DistributeModelParams) of tensors, by first name."""
        self._lacking: set[str] = set()
        """Tensors without values, which only a checkpoint or the model's code can provide."""
        self.bare = False
        """Whether some rank has tensors without values."""
        self.hold: Callable[[str, torch.Tensor], torch.Tensor] | None = None
        """Puts the values of a parameter, on the CPU, where they stay until they are used; None: on the device."""
        self._look()
        self._seed = draw_seed(world) if self.bare else 0
        if self.bare or any(count for (count,) in world.gather_numbers([len(self._lost())])):
            self._together(self._fill_plain, UsageError)
        checkpoint = context.options.checkpoint
        if checkpoint is not None:
            self._together(lambda: self._load(open_weights(checkpoint.expanduser())), CheckpointError)

    # -- where values come from -------------------------------------------------------------------------------

    def _look(self) -> None:
        """Which tensors have no values, on this rank and on others. Collective."""
        lacking = {name for name, tensor in _first(self._context.model)[1].items() if tensor.is_meta}
        told = self._world.gather_bytes(msgspec.msgpack.encode(sorted(lacking)))
        by_rank = [set(msgspec.msgpack.decode(data, type=list[str])) for data in told]
        self._lacking = by_rank[0] if self._sync else lacking
        self.bare = any(by_rank)
        if self._sync:
            _check_rank_0(by_rank)

    def _load(self, weights: Weights) -> None:
        found = match(self._context.model, _first(self._context.model)[0], weights)
        if found.missing or found.unexpected:
            raise CheckpointError(
                f"{weights.where} does not belong to this model: missing {_some(found.missing)}, unexpected "
                f"{plain(_some(found.unexpected))}"
            )
        self.take(weights, found.names)

    def take(self, weights: Weights, names: Mapping[str, str]) -> None:
        """Use a checkpoint, by the names in it for names of the model, when the model is deployed."""
        first = _first(self._context.model)[0]
        self._given.update({first[name]: (weights, there) for name, there in names.items()})

    def afterwards(self, finish: Callable[[], None]) -> None:
        """Register a callback for when values are materialized and the optimizer has this rank's parameters."""
        self._finish = finish

    def finish(self) -> None:
        """Run the callback of `afterwards`. Collective."""
        finish, self._finish = self._finish, None
        if finish is not None:
            self._together(finish, CheckpointError)

    def prepare(self, used: Callable[[str], bool]) -> None:
        """Decide the source of each value before materializing any; `used` tells whether the graph reads a tensor.

        UsageError for tensors without a source. Collective.
        """
        if self.bare:
            self._look()  # the script may have assigned values since
            self._together(lambda: self._prepare(used), UsageError)
            if self._sync:
                self._check_alike()

    def _prepare(self, used: Callable[[str], bool]) -> None:
        _, tensors = _first(self._context.model)
        by_id = recipes_of(self._context.model)
        recipes = {name: by_id[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_id}
        for recorder in dict.fromkeys(recipe.recorder for recipe in recipes.values()):
            recorder.tape.name_draws([(name, each.view) for name, each in recipes.items() if each.recorder is recorder])
        wanted = [name for name in tensors if name in self._lacking and name not in self._given]
        for name in wanted:
            if name in recipes:
                check_unchanged(name, tensors[name], recipes[name])
                self._constructed[name] = recipes[name]
        without = [name for name in wanted if name not in recipes]
        if not without:
            return
        with self._all_bare():
            recorder = record_initialisation(self._context.model, {id(tensors[name]) for name in without}, self._seed)
            _, tensors = _first(self._context.model)  # buffers may be others now
            views = [(name, recorder.view(tensor)) for name, tensor in tensors.items()]
        known = [(name, view) for name, view in views if view is not None and recorder.tape.written(view)]
        recorder.tape.name_draws(known)
        self._own = {name: Recipe(recorder, view, 0) for name, view in known if name in without}
        unknown = [name for name in without if name not in self._own]
        fatal = [name for name in unknown if used(name) or isinstance(tensors[name], nn.Parameter)]
        if fatal:
            raise UsageError(
                f"{_what(tensors[fatal[0]])} {fatal[0]} is on the meta device, and has no source of initial values"
                f"{_owner(self._context.model, fatal[0])}; {ADVICE}"
                + (f" (also: {_some(fatal[1:])})" if fatal[1:] else "")
            )
        if unknown and self._world.rank == 0:
            log.get("ParamStorage").warning("Buffers %s have no values and are not used: they read as NaN", unknown)

    def _check_alike(self) -> None:
        """UsageError if ranks would compute different values of a tensor, e.g. due to Python's or NumPy's RNG."""
        recipes = {**self._constructed, **self._own}
        mine = {name: recipe.recorder.tape.digest(recipe.view) for name, recipe in recipes.items()}
        told = self._world.gather_bytes(msgspec.msgpack.encode(mine))
        by_rank = [msgspec.msgpack.decode(data, type=dict[str, bytes]) for data in told]
        for rank, theirs in enumerate(by_rank):
            other = [name for name, digest in by_rank[0].items() if theirs.get(name) != digest]
            if other:
                raise UsageError(
                    f"rank {rank} would compute other values of {_some(other)} than rank 0: the code that makes them "
                    "draws from Python's or NumPy's random numbers, or does something else, or prints values, on some "
                    "ranks only; seed these alike, and let all ranks build the model in the same way"
                )

    # -- getting them -----------------------------------------------------------------------------------------

    def fill(self, own: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Materialize the tensors that this rank holds, one at a time. Collective.

        Returns the names of tensors that have their final values on every rank that holds them; the others have or
        await rank 0's.
        """
        if self.bare or self._given:
            self._together(lambda: self._fill(own, tensors), CheckpointError if self._given else UsageError)
        return set(self._given) | {name for name in tensors if name in self._lacking}

    def _fill(self, own: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> None:
        converted: dict[str, str] = {}
        counts = {"checkpoint": 0, "constructor": 0, "initialisation": 0}
        blank: list[str] = []
        with kept_generators(), torch.no_grad():
            for name in own:
                tensor = tensors[name]
                recipe = self._own.get(name) or self._constructed.get(name)
                if name in self._given:
                    weights, there = self._given[name]
                    value = weights.read(there)
                    counts["checkpoint"] += 1
                    if value.dtype != tensor.dtype:
                        converted[name] = f"{value.dtype} -> {tensor.dtype}"
                elif recipe is not None:
                    value = self._remade(name, recipe, blank)
                    counts["initialisation" if name in self._own else "constructor"] += 1
                elif tensor.is_meta:
                    value = torch.full((), float("nan")).expand(tensor.shape)  # rank 0 sends it, or it is unused
                    value = value if tensor.is_floating_point() else torch.zeros(tensor.shape)
                else:
                    continue
                self._put(name, tensor, value)
        self._tell(counts, converted, blank)

    def _remade(self, name: str, recipe: Recipe, blank: list[str]) -> torch.Tensor:
        try:
            value, holes = recipe.recorder.tape.replay(recipe.view)
        except Unrepeatable as exc:
            raise UsageError(f"{name} cannot be reproduced from its recorded constructor: {exc}") from exc
        except Exception as exc:  # operators may raise anything
            if is_out_of_memory(exc):
                raise
            raise UsageError(
                f"the recorded operators of {name} fail with actual values: {type(exc).__name__}: {exc}; the model's "
                "own code would fail so without DistributeModelParams and the meta device, too"
            ) from exc
        if holes is not None:
            if name in self._own:
                owner = _owner(self._context.model, name)
                raise UsageError(
                    f"{name} is on the meta device, and the initialisation of its module{owner} "
                    f"leaves {int(holes.sum())} of its {value.numel()} values open; {ADVICE}"
                )
            value = value.masked_fill(holes, 0)
            blank.append(name)
        return value

    def _put(self, name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not tensor.is_meta:
            tensor.copy_(value)
            return
        hold = self.hold if tensor.requires_grad else None
        device = self._world.device if hold is None else torch.device("cpu")
        made = torch.empty_strided(tensor.shape, _dense(tensor), dtype=tensor.dtype, device=device)
        if value.dtype == made.dtype and value.device == made.device and value.stride() == made.stride():
            made = value
        else:
            made.copy_(value)
        give(tensor, made if hold is None else hold(name, made))
        tensor.grad = None

    def _fill_plain(self) -> None:
        """Tensors in other attributes of modules, which every rank has whole: a graph has them as constants."""
        recorders = recorders_of(self._context.model)
        with kept_generators(), torch.no_grad():
            for path, tensor in plain_tensors(self._context.model):
                for recorder in recorders if tensor.is_meta else ():
                    view = recorder.view(tensor)
                    if view is None:
                        continue
                    recorder.tape.name_draws([(path, view)])
                    value, holes = recorder.tape.replay(view)
                    give(tensor, value if holes is None else value.masked_fill(holes, 0))
                    break

    def close(self) -> None:
        """Free everything that is not needed once all values are materialized."""
        self.bare = False
        self.hold = None
        self._lacking = set()
        self._own.clear()
        self._constructed.clear()
        self._given.clear()
        forget(self._context.model)

    # -- without values ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def readable(self, *, planned_only: bool) -> Iterator[Sequence[torch.Tensor] | None]:
        """During tracing, make tensors without values appear on the CPU, without using memory.

        This includes plain tensor attributes if the graph is `planned_only`; otherwise a trace that fails because it
        reads one raises a UsageError. Yields None in this case, and an empty sequence if all tensors have values.
        """
        if not self.bare:
            yield ()
            return
        lost = self._lost()
        tensors = [*_first(self._context.model)[1].values(), *(lost.values() if planned_only else ())]
        away = [tensor for tensor in tensors if tensor.device.type != "cpu" and tensor.layout is torch.strided]
        try:
            with others(away, unwritten):
                yield None
        except TraceError as exc:
            if planned_only or not lost:
                raise
            raise UsageError(f"{_without(list(lost))}. Tracing ended with: {exc}") from exc

    def check_leaves(self, paths: Iterable[str]) -> None:
        """UsageError if an opaque module may read a plain tensor attribute without values."""
        lost = self._lost() if self.bare else {}
        inside = [name for name in lost for path in paths if not path or f"{name}.".startswith(f"{path}.")]
        if inside:
            raise UsageError(f"{_without(inside)}. (The module runs as it is, because it cannot be traced)")

    def _lost(self) -> dict[str, torch.Tensor]:
        """Tensors in other attributes of modules that have no values."""
        return {path: tensor for path, tensor in plain_tensors(self._context.model) if tensor.is_meta}

    @contextlib.contextmanager
    def _all_bare(self) -> Iterator[None]:
        """All of the model on the meta device, as a Recorder wants it."""
        tensors = [*_first(self._context.model)[1].values(), *(each for _, each in plain_tensors(self._context.model))]
        with others([each for each in tensors if not each.is_meta and each.layout is torch.strided], bare):
            yield

    # -- all ranks --------------------------------------------------------------------------------------------

    def _together(self, act: Callable[[], object], raised: type[RanndError]) -> None:
        """Run `act` on every rank; an error on one rank is raised on all."""
        error = ""
        cause: RanndError | None = None
        try:
            act()
        except RanndError as exc:
            error, cause = str(exc), exc
        try:
            agree_on_errors(self._world, error, raised, outcome="the model was not deployed on any")
        except RanndError as exc:
            raise exc from cause

    def _tell(self, counts: Mapping[str, int], converted: Mapping[str, str], blank: Sequence[str]) -> None:
        logger = log.get("ParamStorage")
        if any(counts.values()):
            logger.info(
                "Values of %d tensors from the checkpoint, %d from constructors, %d from initialisation (rank%d)",
                *counts.values(),
                self._world.rank,
            )
        if converted:
            name = next(iter(converted))
            logger.info("%d tensors were converted, the first is %s (%s)", len(converted), name, converted[name])
        if blank:
            logger.warning("The constructor leaves memory of %s without values (torch.empty): they are 0", _some(blank))


def _without(names: Sequence[str]) -> str:
    return (
        f"{_some(names)}: tensors of the model on the meta device that are neither parameters nor buffers, and nothing "
        "says what their values are; build the model under pyrannc.DistributeModelParams() in place of "
        "torch.device('meta')"
    )


def _check_rank_0(by_rank: Sequence[set[str]]) -> None:
    for rank, names in enumerate(by_rank):
        more = sorted(by_rank[0] - names)
        if more:
            raise UsageError(
                f"rank {rank} has values for {more[0]} and rank 0 has none (meta device), but ranks take rank 0's; "
                "build the model with values on rank 0, or on the meta device on all ranks"
            )


def _first(model: nn.Module) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Map each name to the first name of its tensor, and first names to tensors."""
    names: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[int, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names[name] = seen.setdefault(id(tensor), name)
        tensors.setdefault(names[name], tensor)
    return names, tensors


def _dense(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of a dense tensor with the same order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride()


def _what(tensor: torch.Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _owner(model: nn.Module, name: str) -> str:
    path = name.rpartition(".")[0]
    kind = type(model.get_submodule(path)).__qualname__
    return f" ({kind}{f' {path}' if path else ''})"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
    return f"[{shown}]"
