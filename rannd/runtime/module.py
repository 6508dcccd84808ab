"""RaNNCModule: the wrapper that a training script sees."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rannd import config as configuration
from rannd import log
from rannd.errors import StepError, UsageError
from rannd.graph.signature import flatten_call
from rannd.plan.deployment import Deployment
from rannd.runtime import switches
from rannd.runtime.deploy import save
from rannd.runtime.session import Session, ensure_single_wrap
from rannd.runtime.state import gather_state, gather_tensor, scatter_state
from rannd.runtime.world import current

_wrapped: weakref.WeakSet[RaNNCModule] = weakref.WeakSet()


class RaNNCModule(nn.Module):
    """A model that runs on all ranks of the job.

    Wrap an unmodified model and, optionally, its optimizer; at the first call the model is traced, planned and
    distributed. Every rank calls it with its own mini-batch (samples in the first dimension) and gets its own
    outputs back; gradients are the mean over ranks, as with DistributedDataParallel. A scalar loss that the model
    computes is returned as the global value, the same on all ranks.

    Args:
        model: The model. Its parameters may be on any device; ranks other than those that run a layer give its
            memory back at the first call.
        optimizer: Its optimizer; afterwards it holds this rank's own parameters only.
        load_deployment: A file that `save_deployment` wrote, to be used instead of planning.
        outputs: Of a model that returns a loss with other outputs, training hands only those of up to 64 KiB a sample
            to the ranks ("auto") where stages would have to send them; using another one raises StepError. "all":
            hands over all of them.
        scaler: The script's GradScaler; with it, backward can begin inside the forward call under fp16 autocast, too.
        gather_inputs: False: rank 0's mini-batch is the whole batch, and its outputs come back on every rank, as if one
            process ran it; the other ranks' arguments matter in structure only.
        enable_apex_amp, allreduce_amp_master_params, use_amp_master_params, enable_zero,
        check_unused_values, offload_params: RaNNC's switches. Values other than the defaults are refused: they are
            not available in this version.

    Raises:
        ConfigError: The configuration is wrong.
        UsageError: The model is wrapped already, or a switch is not available.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        gather_inputs: bool = True,
        load_deployment: str | Path | None = None,
        enable_apex_amp: bool = False,
        allreduce_amp_master_params: bool = False,
        enable_zero: bool = False,
        check_unused_values: bool = True,
        offload_params: bool = False,
        use_amp_master_params: bool = False,
        *,
        outputs: str = "auto",
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        super().__init__()
        refused = {
            "enable_apex_amp": enable_apex_amp,
            "allreduce_amp_master_params": allreduce_amp_master_params,
            "use_amp_master_params": use_amp_master_params,
            "enable_zero": enable_zero,
            "check_unused_values": not check_unused_values,
            "offload_params": offload_params,
        }
        for name, changed in refused.items():
            if changed:
                raise UsageError(f"{name} is not available in this version of rannd; leave it at its default")
        if outputs not in ("auto", "all"):
            raise UsageError(f'outputs={outputs!r}; use "auto" or "all"')
        if isinstance(model, torch.jit.ScriptModule):
            raise UsageError(
                "RaNNCModule traces a model's Python code; wrap the module that the ScriptModule was made of"
            )
        if not isinstance(model, nn.Module):
            raise UsageError(f"RaNNCModule wraps a torch.nn.Module, not a {type(model).__qualname__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"optimizer is a {type(optimizer).__qualname__}; a torch.optim.Optimizer is wanted")
        if optimizer is not None and not _shares_parameters(model, optimizer):
            raise UsageError(
                "the optimizer has none of the model's parameters; make it from the parameters of the model that is "
                "wrapped, after all that replaces them"
            )
        config = configuration.load()
        log.setup(level=config.log_level)
        if config.show_config_items:
            for line in config.lines():
                log.get("RaNNCModule").info("%s", line)
        for warning in config.no_effect_warnings():
            log.get("RaNNCModule").warning("%s", warning)
        if (config.save_deployment or config.load_deployment) and not config.deployment_file:
            raise UsageError("save_deployment or load_deployment is set, but deployment_file names no file")
        ensure_single_wrap(model)
        file = Path(load_deployment) if load_deployment else None
        if file is None and config.load_deployment:
            file = Path(config.deployment_file)
        self.__dict__["_inner"] = model
        self._config = config
        self._optimizer = optimizer
        self._session = Session(
            current(config),
            config,
            model,
            optimizer,
            load_deployment=file,
            sync=switches.sync_params,
            all_outputs=outputs == "all",
            scaler=scaler,
            shared=not gather_inputs,
        )
        self.training = model.training
        _wrapped.add(self)

    # -- calls ------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for this rank's mini-batch. Collective."""
        if self._session is None:
            raise StepError("this RaNNCModule was dropped by pyrannc.clear(); wrap a model anew")
        planned = self._session.deployment is not None
        with self._session.world.watch.inside("forward"):
            output = self._session.run(flatten_call(args, kwargs), self._inner.training, lambda: switches.delayed)
        if not planned and self._config.save_deployment and self._session.world.rank == 0:
            self.save_deployment(self._config.deployment_file)
        return output

    def allreduce_grads(self) -> None:
        """Reduce the gradients that `delay_grad_allreduce(True)` has held back. Collective."""
        self._session.reduce()

    def clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their 2-norm over the whole model is at most `max_norm`.

        Returns the norm before. Collective.
        ``torch.nn.utils.clip_grad_norm_`` sees the parameters of this rank alone: with several stages use this method.
        """
        return self._session.clip(max_norm)

    # -- what the model has -----------------------------------------------------------------------------------

    @property
    def deployment(self) -> Deployment:
        """The deployment in use. StepError before the first call."""
        if self._session.deployment is None:
            raise StepError("the model is deployed at its first call; call it before asking for its deployment")
        return self._session.deployment

    def save_deployment(self, file: str | Path) -> None:
        """Write the deployment to `file`, for ``RaNNCModule(load_deployment=file)``."""
        save(self.deployment, Path(file))

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the model's own."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_inner")
            if inner is None:
                raise
            return getattr(inner, name)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True, from_global: bool = False
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that this rank holds (all of them before the first call).

        With `from_global`, copies on the CPU of all parameters, on every rank; collective.
        """
        yield from self._named(self._inner.named_parameters(prefix, recurse, remove_duplicate), prefix, from_global)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True, from_global: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that this rank holds; see `named_parameters`."""
        yield from self._named(self._inner.named_buffers(prefix, recurse, remove_duplicate), prefix, from_global)

    def parameters(self, recurse: bool = True, from_global: bool = False) -> Iterator[nn.Parameter]:
        """See `named_parameters`."""
        for _, parameter in self.named_parameters(recurse=recurse, from_global=from_global):
            yield parameter

    def buffers(self, recurse: bool = True, from_global: bool = False) -> Iterator[torch.Tensor]:
        """See `named_buffers`."""
        for _, buffer in self.named_buffers(recurse=recurse, from_global=from_global):
            yield buffer

    def _named(self, pairs: Iterator[tuple[str, Any]], prefix: str, from_global: bool) -> Iterator[tuple[str, Any]]:
        held = self._session.parameters
        own = set(held.own) if held is not None else set()
        for name, tensor in pairs:
            if held is None:
                yield name, tensor.detach().to("cpu", copy=True) if from_global else tensor
                continue
            first = held.names[name.removeprefix(f"{prefix}.") if prefix else name]
            if from_global:
                yield name, gather_tensor(self._session.world, held, first, everywhere=True)
            elif first in own:
                yield name, tensor

    def get_param(self, name: str) -> torch.Tensor:
        """A copy of a parameter on the CPU, on every rank. Collective."""
        held = self._session.parameters
        if held is None:
            parameter: torch.Tensor = self._inner.get_parameter(name)
            return parameter.detach().to("cpu", copy=True)
        if name not in held.names:
            raise UsageError(f"the model has no parameter {name!r}")
        found = gather_tensor(self._session.world, held, held.names[name], everywhere=True)
        assert found is not None
        return found

    def state_dict(self, *args: Any, rank0_only: bool = True, no_hook: bool = False, **kwargs: Any) -> Any:
        """The whole model's state, with buffers and tied names, as copies on the CPU. Collective.

        With `rank0_only` the other ranks get an empty dict. Before the first call it is the model's own state_dict.
        """
        held = self._session.parameters
        if held is None:
            return self._inner.state_dict(*args, **kwargs)
        return gather_state(self._session.world, held, self._inner, everywhere=not rank0_only)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a whole model's state, given on every rank. At any time."""
        held = self._session.parameters
        if held is None:
            return self._inner.load_state_dict(state_dict, strict, assign)
        return scatter_state(held, self._inner, state_dict, strict=strict)

    # -- as any module ----------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> RaNNCModule:
        """Training or evaluation mode; each has a graph of its own, traced when it is needed."""
        self.training = mode
        self._inner.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module, for the parameters that this rank holds."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RaNNCModule:
        """`.to()`, `.cuda()` and the like have no effect: every rank computes on its own device."""
        log.get("RaNNCModule").warning(
            "A RaNNCModule cannot be moved or converted; do that to the model before it is wrapped"
        )
        return self

    def drop(self) -> None:
        """Forget deployment and graphs; see `pyrannc.clear`."""
        self._session = None  # type: ignore[assignment]


def _shares_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def clear() -> None:
    """Drop all wrapped models of this process; the ranks stay connected."""
    for module in list(_wrapped):
        module.drop()
    _wrapped.clear()
    switches.delayed = False
    switches.keeps_graph = False
