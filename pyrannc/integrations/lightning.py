"""``Trainer(strategy="rannc")`` of Lightning, in a script that `rannc-run` starts and that imports this module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

import pyrannc
from pyrannc.integrations.lightning_forward import TENSORS, OwnForward, by_itself, has_parameters, no_layers
from rannd.errors import UsageError
from rannd.runtime.step_metrics import StepMetrics


class RaNNCStrategy(DDPStrategy):
    """Partitions the module of a LightningModule that has its parameters, over the ranks of `rannc-run`.

    ``training_step`` and the other hooks run on each rank with its own mini-batch, as under DDPStrategy; calls of the
    module run on all ranks. After the first stage of a Trainer the LightningModule has a RaNNCModule in its place.

    Args:
        module: Name of the module in the LightningModule, as ``named_modules()`` has it; by default its only child
            with parameters, else the LightningModule itself ("") with its ``forward``.
        outputs: As of `RaNNCModule`. "all" is for a training_step that reads large outputs of a module that returns a
            loss, too.

    Raises:
        UsageError: Some parameters are outside of the module, there are several optimizers, or training_step does not
            call the module.
    """

    strategy_name = "rannc"

    def __init__(self, module: str | None = None, outputs: str = "auto", **kwargs: Any) -> None:
        super().__init__(cluster_environment=_Ranks(), **kwargs)
        self._outputs = outputs
        self._given_name = self._module_name = module
        self.wrapper: pyrannc.RaNNCModule | None = None
        """The partitioned module, once a stage of the Trainer was set up."""
        self._trains = False
        """Whether the wrapper has the optimizer."""

    def _configure_launcher(self) -> None:
        pass  # rannc-run has started the ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """What a rank's DistributedSampler has to know."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    def set_world_ranks(self) -> None:
        """Let rank 0 alone tell and show what one rank has to."""
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def connect(self, model: LightningModule) -> None:
        """Take a LightningModule, of which another Trainer may have wrapped the module."""
        super().connect(model)
        wrapped = [(name, each) for name, each in model.named_modules() if isinstance(each, pyrannc.RaNNCModule)]
        if isinstance(model.forward, OwnForward):
            wrapped = [("", model.forward.wrapper)]
        self._module_name, self.wrapper = wrapped[0] if wrapped else (self._given_name, None)

    def setup(self, trainer: Trainer) -> None:
        """Wrap the module, with the optimizer if there is training."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        assert isinstance(self.lightning_module, LightningModule)
        if self._module_name is None:
            self._module_name = _module_with_parameters(self.lightning_module)
        if self.wrapper is None:
            module = self.precision_plugin.convert_module(self.lightning_module.get_submodule(self._module_name))
            if self._module_name:
                self.lightning_module.set_submodule(self._module_name, module)
        with self._without_module():
            self.model_to_device()
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self.wrapper is not None:  # the optimizer is a new one
            self._unwrap(self.wrapper)
        if fits:
            self.setup_optimizers(trainer)
        if self.wrapper is None:
            self._wrap(trainer if fits else None)
        self.setup_precision_plugin()

    def _wrap(self, trainer: Trainer | None) -> None:
        """`trainer`: which has an optimizer for the module."""
        lightning_module, name = self.lightning_module, self._module_name
        assert lightning_module is not None
        assert name is not None
        module, read = lightning_module.get_submodule(name), None
        if not name:
            module, read = by_itself(lightning_module)
        inside = {id(each) for each in module.parameters()}
        outside = [
            each
            for each, value in lightning_module.named_parameters()
            if id(value) not in inside and (name or value.requires_grad)
        ]
        if outside:
            raise UsageError(
                f'strategy="rannc": {outside[0]} (and {len(outside) - 1} more) is not a parameter of '
                f"{type(lightning_module).__name__}.{name}, which is partitioned; put all layers into one module"
            )
        optimizer = None
        if trainer is not None:
            if len(self.optimizers) != 1:
                raise UsageError(
                    f'strategy="rannc": {type(lightning_module).__name__}.configure_optimizers returns '
                    f"{len(self.optimizers)} optimizers; a partitioned module has one"
                )
            optimizer = self.optimizers[0]
        scaler = getattr(self.precision_plugin, "scaler", None) if optimizer is not None else None
        self.wrapper = pyrannc.RaNNCModule(module, optimizer, outputs=self._outputs, scaler=scaler)
        self._trains = optimizer is not None
        if read is None:
            lightning_module.set_submodule(name, self.wrapper)
        else:
            OwnForward(lightning_module, self.wrapper, read).enter()

    def _unwrap(self, wrapper: pyrannc.RaNNCModule) -> None:
        assert self.lightning_module is not None
        assert self._module_name is not None
        wrapper.undeploy()
        if isinstance(self.lightning_module.forward, OwnForward):
            self.lightning_module.forward.leave()
        else:
            self.lightning_module.set_submodule(self._module_name, wrapper.module)
        wrapper.drop()
        self.wrapper = None

    def teardown(self) -> None:
        """Leave the module where it is: a rank does not have all of it to move to the CPU."""
        with self._without_module() if self.wrapper is not None else contextlib.nullcontext():
            super().teardown()

    @contextlib.contextmanager
    def _without_module(self) -> Iterator[None]:
        """Take the module out of the LightningModule meanwhile; all that has parameters, if it is the module itself."""
        lightning_module, name = self.lightning_module, self._module_name
        assert lightning_module is not None
        assert name is not None
        if name:
            module = lightning_module.get_submodule(name)
            lightning_module.set_submodule(name, nn.Identity())
            try:
                yield
            finally:
                lightning_module.set_submodule(name, module)
            return
        whole = {key: lightning_module.__dict__[key] for key in TENSORS}
        lightning_module.__dict__.update({key: {} for key in TENSORS}, _modules=no_layers(lightning_module))
        try:
            yield
        finally:
            lightning_module.__dict__.update(whole)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run training_step of the LightningModule."""
        found = super().training_step(*args, **kwargs)
        if found is not None and self.wrapper is not None and not self.wrapper._session.audits.steps:
            name = type(self.lightning_module).__name__
            place = f"self.{self._module_name}(..)" if self._module_name else "self(..)"
            raise UsageError(
                f'strategy="rannc": {name}.training_step does not call {place}, so that nothing of it ran on several '
                f"ranks; compute with {place}"
                + ("" if self._module_name else ", or put all layers into one module and call that")
            )
        return found

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add gradients without reducing them."""
        with self.wrapper.no_sync() if self.wrapper is not None else contextlib.nullcontext():
            yield

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole LightningModule on rank 0. Collective."""
        assert self.lightning_module is not None
        if self.wrapper is None:
            return dict(self.lightning_module.state_dict())
        with self._without_module():
            rest = type(self.lightning_module).state_dict(self.lightning_module)
        whole = self.wrapper.state_dict()
        own = {f"{self._prefix}{name}": value for name, value in whole.items()} if self.is_global_zero else {}
        return {**rest, **own}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of a whole LightningModule, which all ranks have read. Collective."""
        if self.wrapper is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        assert self.lightning_module is not None
        state, prefix = checkpoint["state_dict"], self._prefix
        outside = () if prefix else tuple(f"{name}." for name in no_layers(self.lightning_module))
        inside = {key for key in state if key.startswith(prefix) and not key.startswith(outside)}
        own = {key.removeprefix(prefix): value for key, value in state.items() if key in inside}
        self.wrapper.load_state_dict(own, strict=strict)
        with self._without_module():
            rest = {key: value for key, value in state.items() if key not in inside}
            type(self.lightning_module).load_state_dict(self.lightning_module, rest, strict=strict)

    @property
    def _prefix(self) -> str:
        """What keys of the module's tensors begin with in a checkpoint."""
        return f"{self._module_name}." if self._module_name else ""

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state for the whole model. Collective."""
        plain: Any = getattr(optimizer, "optimizer", optimizer)
        if self.wrapper is None or not self._trains:
            return dict(plain.state_dict())
        return dict(plain.state_dict(from_global=True))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what `optimizer_state` has returned."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


class RaNNCMetrics(Callback):
    """Tells the Trainer's loggers, each time that it logs a step, what `PlanMetrics` tells."""

    def __init__(self) -> None:
        self._metrics: StepMetrics | None = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """On all ranks."""
        strategy = trainer.strategy
        if not isinstance(strategy, RaNNCStrategy) or strategy.wrapper is None:
            raise UsageError('RaNNCMetrics is for Trainer(strategy="rannc")')
        if self._metrics is None:
            self._metrics = StepMetrics(strategy.wrapper._session)
        if (trainer.fit_loop.epoch_loop.total_batch_idx + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            found = self._metrics.collect()
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)

    def on_fit_end(self, *_: Any) -> None:
        """Forget the model of this training."""
        self._metrics = None


class _Ranks(ClusterEnvironment):
    """The ranks of the job, for Lightning."""

    @staticmethod
    def detect() -> bool:
        return False  # chosen by the strategy

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"]) if "MASTER_PORT" in os.environ else find_free_network_port()

    def world_size(self) -> int:
        return pyrannc.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return pyrannc.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", "0"))


def _module_with_parameters(lightning_module: LightningModule) -> str:
    """Return the name of the only child with parameters, else "" for a LightningModule with a forward of its own."""
    names = [name for name, child in lightning_module.named_children() if has_parameters(child)]
    if len(names) == 1 and not has_parameters(lightning_module, recurse=False):
        return names[0]
    if type(lightning_module).forward is not LightningModule.forward:
        return ""
    raise UsageError(
        f'strategy="rannc" partitions one module, but {type(lightning_module).__name__} has parameters in '
        f"{len(names)} of its modules ({', '.join(names)}) and no forward; write one, and call self(..) in "
        "training_step, or put all layers into one module, and call that"
    )


StrategyRegistry.register(
    RaNNCStrategy.strategy_name,
    RaNNCStrategy,
    description="Pipeline stages with data-parallel replicas, planned by rannd",
)
