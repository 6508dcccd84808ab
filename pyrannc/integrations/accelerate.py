"""`RaNNCAccelerator`, to be used instead of Hugging Face's `Accelerator` in a script that `rannc-run` starts."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import accelerate
import huggingface_hub
import torch
from accelerate.utils import DistributedType, convert_to_fp32
from torch import nn

import pyrannc
from rannd.errors import UsageError
from rannd.graph.python_state.guards import HOOKS

STATE = "rannc"
"""Folder in a state of Accelerate's with the model and optimizer of all ranks, see `pyrannc.save_checkpoint`."""


class RaNNCAccelerator(accelerate.Accelerator):
    """An Accelerator whose models are partitioned over the ranks of `rannc-run`.

    Takes the arguments of `accelerate.Accelerator`. `prepare` wraps the models that it is given, each with that of the
    optimizers that steps its parameters; `save_state` saves the state of all ranks, from which any number of ranks goes
    on.

    Raises:
        UsageError: DeepSpeed, FSDP or the like would distribute the models, or Accelerate does not know of the other
            ranks.
    """

    _models: list[_Prepared]
    _optimizers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.distributed_type not in (DistributedType.NO, *_REPLICAS):
            raise UsageError(
                f"RaNNCAccelerator partitions models; remove what asks for {self.distributed_type.value} from the "
                "Accelerator's arguments and from its configuration"
            )
        ranks = pyrannc.get_world_size()
        if self.num_processes != ranks:
            raise UsageError(
                f"the job has {ranks} ranks, but Accelerate sees {self.num_processes}, so that each would read the "
                "same data; on CPUs pass cpu=True"
            )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Wrap models with their optimizers, and prepare the rest as Accelerate does; in the order of `args`.

        An optimizer may follow in a call of its own, before the first call of its model. UsageError for another one.
        """
        optimizers = [getattr(each, "optimizer", each) for each in args if isinstance(each, torch.optim.Optimizer)]
        wrapped = [
            _Prepared(self, each, _optimizer_of(each, optimizers))
            if isinstance(each, nn.Module) and not isinstance(each, _Prepared)
            else each
            for each in args
        ]
        models = {id(each): each for each in (*self._models, *wrapped) if isinstance(each, _Prepared)}
        for model, optimizer in itertools.product(models.values(), optimizers):
            if _steps(optimizer, model):
                model.step_with(optimizer)
        return super().prepare(*wrapped, device_placement=device_placement)

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Note a wrapped model. UsageError for another one, whose optimizer is not known here."""
        if not isinstance(model, _Prepared):
            raise UsageError("accelerator.prepare_model(model): call accelerator.prepare(model, optimizer) instead")
        prepared: nn.Module = super().prepare_model(model, *args, **kwargs)
        return prepared

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> str:
        """Save models and optimizers of all ranks, and what else Accelerate saves. Collective."""
        with self._without_models():
            folder: str = super().save_state(output_dir, safe_serialization, **kwargs)
        for number, model in enumerate(self._models):
            pyrannc.save_checkpoint(_folder(folder, number), model, model.stepped_by)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` has saved, on any number of ranks. Collective."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            saved = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            input_dir = str(max(saved, key=lambda folder: int(folder.name.rpartition("_")[2])))
        with self._without_models():
            super().load_state(input_dir, *args, **kwargs)
        assert input_dir is not None  # else load_state has raised
        for number, model in enumerate(self._models):
            pyrannc.load_checkpoint(_folder(input_dir, number), model, model.stepped_by)

    @contextlib.contextmanager
    def _without_models(self) -> Iterator[None]:
        """Hide from Accelerate, not from hooks, what it would save and load on each rank as if that had all of it."""
        models, optimizers = self._models, self._optimizers
        saving, loading = self._save_model_state_pre_hook, self._load_model_state_pre_hook
        before = dict(saving), dict(loading)

        def save(hook: Callable[..., None], _: Any, __: Any, folder: str) -> None:
            hook(list(models), [self.get_state_dict(each) for each in models], folder)

        def load(hook: Callable[..., None], _: Any, folder: str) -> None:
            hook(list(models), folder)

        own = {id(model.stepped_by) for model in models}
        self._models = []
        self._optimizers = [each for each in optimizers if id(getattr(each, "optimizer", each)) not in own]
        saving.update({key: functools.partial(save, hook) for key, hook in saving.items()})
        loading.update({key: functools.partial(load, hook) for key, hook in loading.items()})
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            saving.update(before[0])
            loading.update(before[1])

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save the whole model as Accelerate does, by rank 0. Collective."""
        state = self.get_state_dict(model)
        if self.is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            huggingface_hub.save_torch_state_dict(
                state, save_directory, max_shard_size=max_shard_size, safe_serialization=safe_serialization
            )
        self.wait_for_everyone()


class _Prepared(pyrannc.RaNNCModule):
    """A partitioned model that computes in the mixed precision of an Accelerator."""

    stepped_by: torch.optim.Optimizer | None

    def __init__(
        self, accelerator: RaNNCAccelerator, model: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> None:
        super().__init__(model, optimizer, scaler=accelerator.scaler)
        self.__dict__["_accelerator"] = accelerator
        self.__dict__["stepped_by"] = optimizer

    def step_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer of the model, if there is none yet."""
        if self.stepped_by is optimizer:
            return
        if self.stepped_by is not None or self._session.deployment is not None:
            why = "has been called" if self.stepped_by is None else f"has {type(self.stepped_by).__name__} already"
            raise UsageError(
                f"accelerator.prepare: {type(optimizer).__name__} steps parameters of a model that {why}, so that its "
                "state would not be saved; use one optimizer for a model, and prepare(model, optimizer) in one call"
            )
        if self._session.followers:
            raise UsageError(
                "accelerator.prepare: an optimizer of a model that an AveragedModel averages already; prepare the "
                "optimizer first, best with the model: prepare(model, optimizer)"
            )
        hooks = {name: self.__dict__[name] for name in HOOKS}
        self.drop()
        _Prepared.__init__(self, self._accelerator, self.module, optimizer)
        self.__dict__.update(hooks)

    @property
    def _is_accelerate_prepared(self) -> bool:
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model in mixed precision, and return outputs in single precision then, as Accelerate's wrapper."""
        if not self._accelerator.native_amp:
            return super().forward(*args, **kwargs)
        with self._accelerator.autocast():
            outputs = super().forward(*args, **kwargs)
        return convert_to_fp32(outputs)


_REPLICAS = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
"""What Accelerate does to a model by itself, which is left out."""


def _optimizer_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | None:
    """Return the optimizer that steps a parameter of the model; None: it is not trained."""
    return next((optimizer for optimizer in optimizers if _steps(optimizer, model)), None)


def _steps(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    own = {id(each) for each in model.parameters()}
    return any(id(each) in own for group in optimizer.param_groups for each in group["params"])


def _folder(folder: str, number: int) -> Path:
    return Path(folder, f"{STATE}_{number}" if number else STATE)
