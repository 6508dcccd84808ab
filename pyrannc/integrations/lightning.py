"""``Trainer(strategy="rannc")`` of Lightning, in a script that `rannc-run` starts and that imports this module."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
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
from pyrannc.integrations.lightning_forward import TENSORS, OwnForward, by_itself, no_layers, take_trainer
from pyrannc.integrations.lightning_modules import check_parts, exchange, modules_to_partition, names_of
from rannd.errors import UsageError
from rannd.runtime.step_metrics import StepMetrics


class RaNNCStrategy(DDPStrategy):
    """Partitions the modules of a LightningModule that have its parameters, over the ranks of `rannc-run`.

    ``training_step`` and the other hooks run on each rank with its own mini-batch, as under DDPStrategy; calls of the
    modules run on all ranks. After the first stage of a Trainer the LightningModule has RaNNCModules in their places.

    Args:
        module: Name of the module in the LightningModule, as ``named_modules()`` has it, or several. By default its
            only child with parameters, else the LightningModule itself ("") with its ``forward``, or, if its steps
            compute with its children (``self.decoder(self.encoder(x))``), each child.
        outputs: As of `RaNNCModule`. "all" is for a training_step that reads large outputs of a module that returns a
            loss, too.

    Raises:
        UsageError: Some parameters are outside of the modules or in several, a module has several optimizers, no
            optimizer is of any module, or training_step calls none of them.
    """

    strategy_name = "rannc"

    def __init__(self, module: str | Sequence[str] | None = None, outputs: str = "auto", **kwargs: Any) -> None:
        super().__init__(cluster_environment=_Ranks(), **kwargs)
        self._outputs = outputs
        self._given = [module] if isinstance(module, str) else None if module is None else [*module]
        self._names = self._given
        self.wrappers: dict[str, pyrannc.RaNNCModule] = {}
        """The partitioned modules, by name, once a stage of the Trainer was set up."""

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
        """Take a LightningModule, of which another Trainer may have wrapped the modules."""
        super().connect(model)
        wrapped = {name: each for name, each in model.named_modules() if isinstance(each, pyrannc.RaNNCModule)}
        if isinstance(model.forward, OwnForward):
            wrapped = {"": model.forward.wrapper}
        self.wrappers, self._names = wrapped, [*wrapped] or self._given

    def setup(self, trainer: Trainer) -> None:
        """Wrap the modules, with the optimizers if there is training."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        lightning_module = self.lightning_module
        assert isinstance(lightning_module, LightningModule)
        if self._names is None:
            self._names = modules_to_partition(lightning_module)
        if not self.wrappers:
            for name in self._names:
                module = lightning_module.get_submodule(name)
                converted = self.precision_plugin.convert_module(module)
                if converted is not module:
                    exchange(lightning_module, module, converted)
        with self._without_modules():
            self.model_to_device()
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self.wrappers:  # the optimizers are new ones
            self._unwrap()
        if fits:
            self.setup_optimizers(trainer)
        if not self.wrappers:
            self._wrap(trains=fits)
        self.setup_precision_plugin()

    def _wrap(self, trains: bool) -> None:
        """`trains`: with the optimizers."""
        lightning_module, names = self.lightning_module, self._names
        assert lightning_module is not None
        assert names is not None
        if names != [""]:
            check_parts(lightning_module, names)
        optimizers = {name: self._optimizer_of(name) if trains else None for name in names}
        if trains and not any(optimizers.values()):
            raise UsageError(
                f'strategy="rannc": {type(lightning_module).__name__}.configure_optimizers returns no optimizer of the '
                "modules that are partitioned"
            )
        for name, optimizer in optimizers.items():
            module, read = lightning_module.get_submodule(name), None
            if name:
                take_trainer(module)
            else:
                module, read = by_itself(lightning_module)
            scaler = getattr(self.precision_plugin, "scaler", None) if optimizer is not None else None
            wrapper = pyrannc.RaNNCModule(module, optimizer, outputs=self._outputs, scaler=scaler)
            self.wrappers[name] = wrapper
            if read is None:
                exchange(lightning_module, module, wrapper)
            else:
                OwnForward(lightning_module, wrapper, read).enter()

    def _optimizer_of(self, name: str) -> torch.optim.Optimizer | None:
        """Return the optimizer that steps a module's parameters."""
        assert self.lightning_module is not None
        own = {id(each) for each in self.lightning_module.get_submodule(name).parameters()}
        found = [
            optimizer
            for optimizer in self.optimizers
            if any(id(each) in own for group in optimizer.param_groups for each in group["params"])
        ]
        if len(found) > 1:
            kind = type(self.lightning_module).__name__
            raise UsageError(
                f'strategy="rannc": {kind}.configure_optimizers returns {len(found)} optimizers of '
                f"{kind + '.' + name if name else 'the layers of ' + kind}; a partitioned module has one"
            )
        return found[0] if found else None

    def _unwrap(self) -> None:
        lightning_module = self.lightning_module
        assert lightning_module is not None
        for wrapper in self.wrappers.values():
            wrapper.undeploy()
            if isinstance(lightning_module.forward, OwnForward):
                lightning_module.forward.leave()
            else:
                exchange(lightning_module, wrapper, wrapper.module)
            wrapper.drop()
        self.wrappers = {}

    def teardown(self) -> None:
        """Leave the modules where they are: a rank does not have all of them to move to the CPU."""
        with self._without_modules() if self.wrappers else contextlib.nullcontext():
            super().teardown()

    @contextlib.contextmanager
    def _without_modules(self) -> Iterator[None]:
        """Take the modules out of the LightningModule meanwhile; all that has parameters, if it is one of them."""
        lightning_module, names = self.lightning_module, self._names
        assert lightning_module is not None
        assert names is not None
        if names != [""]:
            taken = [(lightning_module.get_submodule(name), nn.Identity()) for name in names]
            for module, other in taken:
                exchange(lightning_module, module, other)
            try:
                yield
            finally:
                for module, other in taken:
                    exchange(lightning_module, other, module)
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
        if found is not None and not any(each._session.audits.steps for each in self.wrappers.values()):
            kind = type(self.lightning_module).__name__
            places = [f"self.{name}(..)" if name else "self(..)" for name in self.wrappers]
            raise UsageError(
                f'strategy="rannc": {kind}.training_step does not call {" or ".join(places)}, so that nothing of it '
                f"ran on several ranks; compute with {places[0]}"
                + (", or name the modules that it calls: RaNNCStrategy(module=[..])" if places == ["self(..)"] else "")
            )
        return found

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add gradients without reducing them."""
        with contextlib.ExitStack() as stack:
            for wrapper in self.wrappers.values():
                stack.enter_context(wrapper.no_sync())
            yield

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole LightningModule on rank 0. Collective."""
        lightning_module = self.lightning_module
        assert lightning_module is not None
        if not self.wrappers:
            return dict(lightning_module.state_dict())
        with self._without_modules():
            state = dict(type(lightning_module).state_dict(lightning_module))
        for wrapper, prefixes in self._wrappers_and_prefixes():
            whole = wrapper.state_dict()
            if self.is_global_zero:
                state |= {f"{prefix}{name}": value for prefix in prefixes for name, value in whole.items()}
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of a whole LightningModule, which all ranks have read. Collective."""
        if not self.wrappers:
            super().load_model_state_dict(checkpoint, strict)
            return
        lightning_module = self.lightning_module
        assert lightning_module is not None
        rest = dict(checkpoint["state_dict"])
        outside = tuple(f"{name}." for name in no_layers(lightning_module))
        for wrapper, prefixes in self._wrappers_and_prefixes():
            own: dict[str, Any] = {}
            for prefix in prefixes:
                inside = {key for key in rest if key.startswith(prefix) and (prefix or not key.startswith(outside))}
                own |= {key.removeprefix(prefix): rest.pop(key) for key in inside}
            wrapper.load_state_dict(own, strict=strict)
        with self._without_modules():
            type(lightning_module).load_state_dict(lightning_module, rest, strict=strict)

    def _wrappers_and_prefixes(self) -> list[tuple[pyrannc.RaNNCModule, list[str]]]:
        """Each wrapper, and what keys of its tensors begin with in a checkpoint."""
        assert self.lightning_module is not None
        return [
            (wrapper, [f"{each}." for each in names_of(self.lightning_module, wrapper)] if name else [""])
            for name, wrapper in self.wrappers.items()
        ]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of whole optimizers, of which each rank takes its part."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


class RaNNCMetrics(Callback):
    """Tells the Trainer's loggers, each time that it logs a step, what `PlanMetrics` tells.

    Of several partitioned modules each has its name before those of its numbers.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, StepMetrics] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """On all ranks."""
        strategy = trainer.strategy
        if not isinstance(strategy, RaNNCStrategy) or not strategy.wrappers:
            raise UsageError('RaNNCMetrics is for Trainer(strategy="rannc")')
        if not self._metrics:
            self._metrics = {name: StepMetrics(each._session) for name, each in strategy.wrappers.items()}
        if (trainer.fit_loop.epoch_loop.total_batch_idx + 1) % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            found: dict[str, float] = {}
            for name, each in self._metrics.items():
                prefix = f"{name}/" if len(self._metrics) > 1 else ""
                found |= {f"{prefix}{key}": value for key, value in each.collect().items()}
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)

    def on_fit_end(self, *_: Any) -> None:
        """Forget the model of this training."""
        self._metrics = {}


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


StrategyRegistry.register(
    RaNNCStrategy.strategy_name,
    RaNNCStrategy,
    description="Pipeline stages with data-parallel replicas, planned by rannd",
)
