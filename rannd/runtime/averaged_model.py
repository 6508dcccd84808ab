"""`pyrannc.AveragedModel`: running averages of a RaNNCModule's parameters, each rank of those that it holds."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad_mode
from torch.optim import swa_utils

from rannd.errors import StepError, UsageError
from rannd.runtime.comm.gather_objects import agree_on_errors
from rannd.runtime.comm.lockstep import Phase, meet
from rannd.runtime.module import RaNNCModule
from rannd.runtime.parameters.absent import part_of
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.parameters.state_dict import gather_state, read_state
from rannd.runtime.parameters.state_elsewhere import described, elsewhere
from rannd.runtime.parameters.substitutes import StandIns

PREFIX = "module."
COUNT = "n_averaged"


class AveragedModel:
    """Stochastic weight averaging and moving averages (EMA), as ``torch.optim.swa_utils.AveragedModel``.

    Its arithmetic is torch's. Each rank averages the parameters that it holds, so that an update does not communicate;
    averages follow their parameters when the model is undeployed and deployed again, and states have the names of
    torch's class around the plain model, so that either loads the other's. Construct it on all ranks.

    Args:
        model: The RaNNCModule, before or after its first call.
        avg_fn, multi_avg_fn, use_buffers: As in torch; neither function: the mean of all updates.

    Raises:
        UsageError: `model` is not a RaNNCModule, or both functions are given.
        StepError: Ranks are at different places of the script.
    """

    def __init__(
        self,
        model: RaNNCModule,
        *,
        avg_fn: Callable[[Tensor, Tensor, Tensor | int], Tensor] | None = None,
        multi_avg_fn: Callable[..., None] | None = None,
        use_buffers: bool = False,
    ) -> None:
        if not isinstance(model, RaNNCModule):
            raise UsageError(
                f"AveragedModel averages a RaNNCModule, not a {type(model).__qualname__}; wrap the model first, or use "
                "torch.optim.swa_utils.AveragedModel"
            )
        if avg_fn is not None and multi_avg_fn is not None:
            raise UsageError("AveragedModel takes avg_fn or multi_avg_fn, not both")
        self._options: dict[str, Any] = {"avg_fn": avg_fn, "multi_avg_fn": multi_avg_fn, "use_buffers": use_buffers}
        self._model = model
        session = model._session
        session.alive()
        meet(session.world, Phase.AVERAGE)
        self.n_averaged = 0
        """Number of updates."""
        self._values: dict[str, Tensor] | None = None
        """Averages of what this rank holds, by the first names of the tensors; None until there is one."""
        self.swapped = False
        """Whether the model has the averages as its values now."""
        self._mode: bool | None = None
        """What `train` or `eval` has set; None: the model's mode in each call."""
        session.followers.append(weakref.ref(self))

    # -- averages ---------------------------------------------------------------------------------------------

    def update_parameters(self, model: nn.Module | None = None) -> None:
        """Take the model's present values into the averages. Not collective.

        Args:
            model: Nothing, or the RaNNCModule, as torch's class takes it.

        Raises:
            UsageError: `model` is another one.
            StepError: Called inside `average_parameters`.
        """
        if model is not None and model is not self._model and model is not self._model.module:
            raise UsageError("update_parameters was given another model than the one that it averages")
        if self.swapped:
            raise StepError(
                "update_parameters inside average_parameters, where the model has the averages; leave it first"
            )
        if self._settled():
            self._average()
        self.n_averaged += 1

    def _settled(self) -> bool:
        """Whether the ranks' values agree: before the first call, those of rank 0 count, which others do not know."""
        session = self._model._session
        return self._values is not None or session.parameters is not None or session.settled

    def _average(self) -> None:
        tensors = self.own()
        if self._values is None:
            self._values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            return
        source, averages = _Flat(tensors), _Flat(self._kept(tensors), like=tensors)
        torch_averages = swa_utils.AveragedModel(_Flat({}), **self._options)
        torch_averages.module = averages
        torch_averages.n_averaged.fill_(self.n_averaged)
        torch_averages.update_parameters(source)

    def own(self) -> dict[str, Tensor]:
        """The parameters and buffers that this rank holds, by first names."""
        held = self._model._session.parameters
        if held is None:
            inner = self._model.module
            return {**dict(inner.named_parameters()), **dict(inner.named_buffers())}
        held.adopt()
        return {name: held.tensors[name] for name in held.own}

    def _kept(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The averages of these tensors alone, with their devices and dtypes; new buffers begin with their values."""
        assert self._values is not None
        self._values = {
            name: tensor.detach().clone()
            if name not in self._values
            else self._values[name]
            if tensor.is_meta
            else tensor.detach().clone().copy_(self._values[name])
            if part_of(tensor) is not None
            else self._values[name].to(tensor.device, tensor.dtype)
            for name, tensor in tensors.items()
        }
        return self._values

    @contextlib.contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Inside, the model has the averages as its values, to be evaluated; on all ranks. Not collective itself."""
        if self.swapped:
            raise StepError("average_parameters inside average_parameters: the model has the averages already")
        if self._values is None:  # no update yet: the averages are the model's values
            yield
            return
        # A backward of earlier calls may follow: it finds the values that it has saved, which count as unchanged.
        tracked = tuple(tensor for tensor in self.own().values() if not tensor.is_inference())
        with grad_mode._unsafe_preserve_version_counter(tracked):
            names = self._swap(None)
            self.swapped = True
            try:
                yield
            finally:
                self.swapped = False
                self._swap(names)

    @torch.no_grad()
    def _swap(self, names: list[str] | None) -> list[str]:
        tensors = self.own()
        averages = self._kept(tensors)
        done = []
        for name, tensor in tensors.items():
            average = averages[name]
            if names is None or name in names:
                before = tensor.detach().clone()
                tensor.copy_(average)
                average.copy_(before)
                done.append(name)
        return done

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the averages as its values, in the mode of `train` or `eval`. Collective."""
        with self.average_parameters(), self._in_mode():
            return self._model(*args, **kwargs)

    def train(self, mode: bool = True) -> AveragedModel:
        """Set the mode of later calls of this object; the model keeps its own. Without, the model's mode counts."""
        self._mode = mode
        return self

    def eval(self) -> AveragedModel:
        """`train(False)`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether calls of this object run in training mode."""
        return self._model.training if self._mode is None else self._mode

    @contextlib.contextmanager
    def _in_mode(self) -> Iterator[None]:
        if self._mode is None:
            yield
            return
        before = {module: module.training for module in self._model.modules()}  # layers may differ
        self._model.train(self._mode)
        try:
            yield
        finally:
            for module, mode in before.items():
                module.training = mode

    def __getattr__(self, name: str) -> Any:
        advice = ""
        if hasattr(nn.Module, name):
            advice = (
                ": it is no torch.nn.Module, and its averages are on the device and in the dtype of the model's "
                "parameters, without gradients; ema.state_dict() gathers them, and inside `with "
                "ema.average_parameters():` the RaNNCModule has them as its parameters"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{advice}")

    @property
    def module(self) -> RaNNCModule:
        """The model that is averaged."""
        return self._model

    # -- the deployment ---------------------------------------------------------------------------------------

    def deployed(self) -> None:
        """Called when the model was deployed: this rank needs the averages of what it holds now."""
        if self._values is not None:
            self._kept(self.own())
        elif self.n_averaged:  # values before the first call, which have not changed since
            self._average()

    def undeploying(self, parameters: Parameters) -> None:
        """Called before the model is undeployed: gather the averages on all ranks. Collective."""
        if self.swapped:
            raise StepError("undeploy inside average_parameters: the model has the averages now; leave it first")
        self._agree()
        if self._values is not None:
            kept, gather = self._kept(self.own()), self._model._session.gather
            found = {name: gather(name, kept.get(name)) for name in parameters.tensors}
            self._values = {name: value for name, value in found.items() if value is not None}

    def _agree(self) -> None:
        """StepError if ranks have updated their averages differently often. Collective."""
        meet(self._model._session.world, Phase.AVERAGES, f"{self.n_averaged} updates")

    # -- states -----------------------------------------------------------------------------------------------

    def state_dict(self, *, rank0_only: bool = True) -> dict[str, Any]:
        """The averages of the whole model, with the names of torch's AveragedModel around the plain model. Collective.

        Returns:
            CPU copies, on rank 0 (`rank0_only=False`: on every rank); entries without values on other ranks.

        Raises:
            StepError: Ranks are at different places of the script.
        """
        session, inner = self._model._session, self._model.module
        held = session.parameters
        if held is None:
            values, first = self._values or {}, {id(tensor): name for name, tensor in self.own().items()}
            with StandIns(inner, lambda place: values.get(first[id(place.original)])):
                state = {name: _copied(value) for name, value in inner.state_dict(prefix=PREFIX).items()}
        else:
            self._agree()
            state = gather_state(
                session.world,
                held,
                inner,
                everywhere=not rank0_only,
                keep_vars=False,
                values=self.held(),
                prefix=PREFIX,
            )
        state = {COUNT: torch.tensor(self.n_averaged), **state}
        return elsewhere(described(state, "")) if rank0_only and session.world.rank != 0 else state

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Go on from the whole state, given on every rank. Collective after the model's first call.

        Raises:
            UsageError: The state does not fit; nothing of it was loaded, on any rank.
        """
        session = self._model._session
        error, found = "", {}
        if not isinstance(state, Mapping) or COUNT not in state:
            error = f"the state of an AveragedModel has {COUNT!r}; this one is another's"
        else:
            plain = {name.removeprefix(PREFIX): each for name, each in state.items() if name.startswith(PREFIX)}
            try:
                found = read_state(session.parameters, self._model.module, plain, strict=strict)
            except Exception as exc:  # hooks of the user's modules may raise anything
                error = f"the state does not fit the averages, nothing of it was loaded: {exc}"
        if session.parameters is not None:
            agree_on_errors(session.world, error, UsageError)
        elif error:
            raise UsageError(error)
        own = self.own()
        values = {name: value.detach().to(own[name].dtype, copy=True) for name, value in found.items() if name in own}
        self.put(values, int(state[COUNT]))

    def held(self) -> dict[str, Tensor]:
        """Averages of what this rank holds, by first names; empty before the first update. For checkpoints.

        StepError inside `average_parameters`, where these are the model's own values.
        """
        if self.swapped:
            raise StepError("a checkpoint inside average_parameters, where the model has the averages; leave it first")
        return {} if self._values is None else self._kept(self.own())

    def put(self, values: dict[str, Tensor], count: int) -> None:
        """Replace the averages of what this rank holds. For checkpoints."""
        self._values = values if count else None
        self.n_averaged = count


class _Flat(nn.Module):
    """Tensors as the parameters and buffers of a module, for torch's arithmetic."""

    def __init__(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        for number, (name, tensor) in enumerate(tensors.items()):
            if isinstance((like or tensors)[name], nn.Parameter):
                self.register_parameter(str(number), nn.Parameter(tensor.detach(), requires_grad=False))
            else:
                self.register_buffer(str(number), tensor.detach())


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
