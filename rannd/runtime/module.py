"""`RaNNCModule`, the wrapper around the user's model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from rannd import config as configuration
from rannd import log
from rannd.errors import StepError, UsageError
from rannd.plan.deployment import Deployment
from rannd.runtime.comm import process_flags
from rannd.runtime.comm.context import Context, WrapOptions
from rannd.runtime.comm.lockstep import forget_uncompared
from rannd.runtime.comm.world import current, made
from rannd.runtime.deployment.step_measuring import forget_latest
from rannd.runtime.failure.user_traceback import shorten_tracebacks
from rannd.runtime.gradients import autograd_inputs, grad_norm
from rannd.runtime.gradients.bypass_watch import BypassWatch
from rannd.runtime.optim import unknown_optimizer
from rannd.runtime.parameters import absent, state_elsewhere
from rannd.runtime.parameters.state_dict import call_whole, copy_of, gather_state, load_later, load_state, own_state
from rannd.runtime.planning import plan_ahead
from rannd.runtime.planning.deployment_file import save_file
from rannd.runtime.session import Session
from rannd.runtime.wrapping import registry
from rannd.runtime.wrapping.inner_calls import InnerCalls
from rannd.runtime.wrapping.other_wrappers import (
    COMPILED_INSIDE,
    NOT_COMPILED,
    NOT_EXPORTED,
    original,
    refuse_data_parallel,
    refuse_sharding,
    refuse_trainer,
    warn_of_mixed_precision,
)
from rannd.runtime.wrapping.rannc_api import check_options
from rannd.runtime.wrapping.varuna_step import training_step
from rannd.runtime.wrapping.wrap_checks import check_model, check_optimizer

_wrapped: weakref.WeakSet[RaNNCModule] = weakref.WeakSet()


_RANNC_ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "model": lambda wrapper: wrapper.module,
    "optimizer": lambda wrapper: wrapper._optimizer,
    "ready": lambda wrapper: wrapper._session.deployment is not None,
    "device": lambda wrapper: wrapper._session.world.device,
    "name_to_param": lambda wrapper: dict(wrapper.named_parameters()),
    "gather_inputs": lambda wrapper: wrapper._gather_inputs,
    "is_training": lambda wrapper: wrapper.training,
    "enable_zero": lambda model: model._config.zero_stage not in ("auto", "0"),
    "step": lambda model: functools.partial(training_step, model, optimizer=model._optimizer, scaler=model._scaler),
}
"""Attributes of RaNNC's wrapper, and `step` of Varuna's; those of the same names in the wrapped model come first."""


class RaNNCModule(nn.Module):
    """A model that runs on all ranks of the job.

    Wraps an unmodified model and, optionally, its optimizer. In the first call the model is traced, partitioned and
    distributed. Every rank calls it with its own mini-batch (samples in the first dimension) and gets its own outputs;
    gradients are averaged over ranks, as with DistributedDataParallel. A scalar loss that the model computes is
    returned as the global value, the same on all ranks.

    Args:
        model: The model. Its parameters may be on any device; in the first call each rank frees those of other stages.
            Parameters on the meta device (or created under `DistributeModelParams`) get memory and values in the first
            call, only on the ranks that use them (docs/parameters.md).
        optimizer: The model's optimizer; from the first call on it has this rank's own parameters only.
        checkpoint: Source of the initial values: a .safetensors file, a folder of such files with Hugging Face's
            index, or a folder of torch.distributed.checkpoint. In the first call each rank reads its own parameters.
        load_deployment: File written by `save_deployment`, to use instead of planning.
        outputs: Which outputs besides a loss training returns. "auto": all but those of more than 64 KiB per sample
            that another stage would have to send; using one of these raises StepError. Of calls that differ in sizes
            alone, the first one decides. "all": all outputs.
        scaler: The script's GradScaler; allows backward to run inside the forward call also under fp16 autocast.
        total_calls: Number of the model's calls in the whole training (evaluation and calls whose gradients are added
            count, too), if the script knows it. With ``replan = "now"`` a better plan is then taken only if the
            remaining ones save more time than the change takes.
        gather_inputs: If False, rank 0's mini-batch is the whole batch and its outputs are returned on every rank, as
            in a single process; of the other ranks' arguments only the structure is used.
        allreduce_amp_master_params, check_unused_values: No effect: gradients of master parameters are reduced anyway,
            and a value that the model does not use is no error.
        enable_zero: Replicas of a stage share the optimizer's state (ZeRO): the configuration item zero_stage, which is
            1 then if it is auto.
        use_amp_master_params: The optimizer steps float32 copies of half-precision parameters: the configuration item
            master_weights.
        offload_params: Parameters are in the device's memory only while they are used: the configuration item
            offload_params, which is true then if it is auto. They are divided as with ZeRO 3, so that enable_zero adds
            nothing.
        enable_apex_amp: An option of RaNNC that raises UsageError, which says what to do instead.

    Raises:
        ConfigError: The configuration is wrong.
        UsageError: The model is already wrapped, or an option is not supported.
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
        checkpoint: str | Path | None = None,
        total_calls: int | None = None,
    ) -> None:
        super().__init__()
        shorten_tracebacks()
        check_options(
            {
                "enable_apex_amp": enable_apex_amp,
                "allreduce_amp_master_params": allreduce_amp_master_params,
            }
        )
        if outputs not in ("auto", "all"):
            raise UsageError(f'outputs={outputs!r}; use "auto" or "all"')
        if total_calls is not None and total_calls < 1:
            raise UsageError(f"total_calls={total_calls}; it is the number of the model's calls, 1 or more")
        given, model = model, original(model)
        check_model(model)
        if optimizer is not None:
            check_optimizer(optimizer, model)
        config = configuration.load()
        if enable_zero and config.zero_stage == "auto" and not offload_params:
            config = dataclasses.replace(config, zero_stage="1")
        if offload_params and config.offload_params == "auto":
            config = dataclasses.replace(config, offload_params="true")
        if use_amp_master_params:
            config = dataclasses.replace(config, master_weights=True)
        log.setup(level=config.log_level)
        if config.show_config_items:
            for line in config.lines():
                log.get("RaNNCModule").info("%s", line)
        file = Path(load_deployment) if load_deployment else None
        if file is None and config.load_deployment:
            file = Path(config.deployment_file)
        self.__dict__["_inner"] = model
        refuse_sharding(self)
        self._config = config
        self._optimizer = optimizer
        self._gather_inputs = gather_inputs
        self._told_uncompiled = False
        options = WrapOptions(
            load_deployment=file,
            checkpoint=Path(checkpoint) if checkpoint is not None else None,
            sync=process_flags.sync_params,
            all_outputs=outputs == "all",
            scaler=scaler,
            shared=not gather_inputs,
            total_calls=total_calls,
        )
        self._scaler = scaler
        self._session = Session(Context.of(current(config), config, model, optimizer, options))
        self.training = model.training
        if type(self).forward is RaNNCModule.forward:
            self.__dict__["forward"] = _forward_like(self, model)
        _wrapped.add(self)
        registry.enter(self, model)
        session = self._session
        for warning in config.no_effect_warnings() if session.world.rank == 0 else ():
            log.get("RaNNCModule").warning("%s", warning)
        self._calls = InnerCalls(self, model, RaNNCModule.forward, lambda: session.deployment is not None)
        if (self._calls.compiled or given is not model) and session.world.rank == 0:
            log.get("RaNNCModule").warning(COMPILED_INSIDE)
        self._bypass: BypassWatch | None = None
        if optimizer is not None and session.world.size > 1 and session.world.rank == 0:  # that one tells
            self._bypass = BypassWatch(optimizer, model, lambda: session.delivered)
        unknown_optimizer.install()
        grad_norm.install()
        autograd_inputs.install()
        absent.install()
        state_elsewhere.install()

    # -- calls ------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's mini-batch and return its outputs. Collective."""
        if torch.compiler.is_dynamo_compiling():  # first: for torch.compile, torch 2.11 says that it exports and traces
            return self._forward_uncompiled(args, kwargs)
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise UsageError(NOT_EXPORTED)
        planned = self._session.deployment is not None
        if self._session.world.rank == 0:  # that one tells
            absent.gradient_reads.tell()
        with self._session.world.watch.inside("forward"), self._calls.aside():
            output = self._session.run(args, kwargs, self._inner.training, lambda: process_flags.delayed)
        if not planned and self._config.save_deployment and self._session.world.rank == 0:
            self.save_deployment(self._config.deployment_file)
        return output

    @_disable_dynamo
    def _forward_uncompiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call from inside of torch.compile, which leaves this function alone."""
        if not self._told_uncompiled:
            self.compile()
        return RaNNCModule.forward(self, *args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped model, as DistributedDataParallel names it. After the first call each rank has a part of it."""
        inner: nn.Module = self._inner
        return inner

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate asks for it: `accelerator.prepare` returns the wrapper as it is, without its own wrappers."""
        warn_of_mixed_precision()
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        pass  # Accelerate notes what it has prepared

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within this context, backward does not reduce gradients; the first backward after it reduces the sum.

        Use it on all ranks. As in DistributedDataParallel; the same as `pyrannc.delay_grad_allreduce`, which all
        wrapped models share.
        """
        before, process_flags.delayed = process_flags.delayed, True
        try:
            yield
        finally:
            process_flags.delayed = before

    def allreduce_grads_zero(self) -> None:
        """RaNNC's name of `allreduce_grads` with ZeRO. Collective."""
        self.allreduce_grads()

    def allreduce_grads(self) -> None:
        """Reduce the gradients that `delay_grad_allreduce(True)` has delayed. Collective."""
        self._session.reduce()

    def clip_grad_norm(
        self,
        max_grad_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scale gradients so that their norm over the whole model is at most `max_grad_norm`. Collective.

        Returns the norm before scaling, the same on all ranks. Equivalent to ``torch.nn.utils.clip_grad_norm_`` of
        ``model.parameters()``, which includes the other stages while models are wrapped.
        """
        self._session.alive()
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_grad_norm, norm_type, error_if_nonfinite, foreach)

    def calc_grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Norm of the gradients over the whole model, the same on all ranks; nothing is scaled. Collective."""
        self._session.ensure_reduced("computing their norm")
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients, norm_type)

    def is_checkpointing_enabled(self) -> bool:
        """Whether activations are recomputed in backward (the configuration item `checkpointing`)."""
        return self._config.checkpointing

    def enable_dropout(self, enable: bool | None) -> None:
        """Switch dropout on or off, in training and in evaluation mode; None: let the mode decide again.

        Each setting has its own graph, traced when the model is next called. docs/semantics.md says what counts as
        dropout. Call it on all ranks.
        """
        self._session.alive()
        self._session.dropout = enable if enable is None else bool(enable)

    def undeploy(self) -> None:
        """Undo the deployment: every rank gets the whole model and the optimizer of all parameters back. Collective.

        Parameters are the same objects, with values and gradients; the optimizer has its state and its original order
        of parameters. The next call deploys the model again. No-op before the first call.

        Raises:
            StepError: There are gradients that were not reduced yet.
            UsageError: The optimizer's state contains an object that cannot be sent to other ranks.
        """
        self._session.undeploy()

    # -- what the model has -----------------------------------------------------------------------------------

    @property
    def deployment(self) -> Deployment:
        """Deployment of the model. StepError before the first call."""
        if self._session.deployment is None:
            raise StepError("the model has no deployment before its first call; call it first")
        return self._session.deployment

    def save_deployment(self, file: str | Path) -> None:
        """Write the deployment to `file`, for ``RaNNCModule(load_deployment=file)`` and `pyrannc.show_deployment`.

        DeploymentError if the file is a symbolic link, or cannot be written.
        """
        save_file(self.deployment, Path(file))

    def _get_name(self) -> str:
        """Return the name of the wrapped model's class, by which Trainer knows how labels are to be smoothed."""
        return str(self._inner._get_name())

    def __repr__(self) -> str:
        """Show the wrapped model, as DistributedDataParallel does."""
        inner = repr(self._inner).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  (module): {inner}\n)"

    def __getattr__(self, name: str) -> Any:
        """Look up other attributes in the wrapped model, then among those that RaNNC's wrapper has."""
        refuse_data_parallel(name)
        refuse_trainer(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = self.__dict__.get("_inner")
            if inner is None:
                raise
            if name in _RANNC_ATTRIBUTES and not hasattr(inner, name):
                return _RANNC_ATTRIBUTES[name](self)
            found = getattr(inner, name)
            return functools.partial(self._save_pretrained, found) if name == "save_pretrained" else found

    def _save_pretrained(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Save the whole model by its own method, on rank 0 alone. Collective; returns None on other ranks."""
        return call_whole(self._session.world, self._session.parameters, self._inner, method, args, kwargs)

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
        from_global: bool = False,
        own: bool = False,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over all parameters of the model, in the model's order; those of other stages have no values here.

        With `own`, over those alone that this rank holds (all of them before the first call). With `from_global`, over
        CPU copies of all parameters, on every rank; collective.
        """
        named = self._inner.named_parameters(prefix, recurse, remove_duplicate)
        yield from self._named(named, prefix, from_global, own)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
        from_global: bool = False,
        own: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the model's buffers; see `named_parameters`."""
        named = self._inner.named_buffers(prefix, recurse, remove_duplicate)
        yield from self._named(named, prefix, from_global, own)

    def parameters(self, recurse: bool = True, from_global: bool = False, own: bool = False) -> Iterator[nn.Parameter]:
        """Iterate over parameters without names; see `named_parameters`."""
        for _, parameter in self.named_parameters(recurse=recurse, from_global=from_global, own=own):
            yield parameter

    def buffers(self, recurse: bool = True, from_global: bool = False, own: bool = False) -> Iterator[torch.Tensor]:
        """Iterate over buffers without names; see `named_buffers`."""
        for _, buffer in self.named_buffers(recurse=recurse, from_global=from_global, own=own):
            yield buffer

    def _named(
        self, pairs: Iterator[tuple[str, Any]], prefix: str, from_global: bool, own: bool
    ) -> Iterator[tuple[str, Any]]:
        self._session.alive()
        held = self._session.parameters
        mine = set(held.own) if held is not None else set()
        for name, tensor in pairs:
            if held is None:
                yield name, _copy(name, tensor) if from_global else tensor
                continue
            first = held.names.get(name.removeprefix(f"{prefix}.") if prefix else name)
            if from_global and first is not None:
                yield name, copy_of(self._session.world, held, first)
            elif not own or first in mine:
                yield name, tensor

    def get_param(self, name: str, amp_master_param: bool = False) -> torch.Tensor:
        """Copy a parameter to the CPU of every rank, by any of its names. Collective.

        `amp_master_param` has no effect: under torch.amp the parameters are the master copies, and master weights are
        in the optimizer's state. UsageError if there is no parameter of that name.
        """
        parameter, held = self._parameter(name), self._session.parameters
        if held is None:
            return _copy(name, parameter)
        return copy_of(self._session.world, held, held.names[name])

    def get_param_grad(self, name: str, amp_master_param: bool = False) -> torch.Tensor | None:
        """Copy a parameter's reduced gradient to the CPU of every rank; None if it has no gradient. Collective.

        StepError while gradients wait for their reduction (`delay_grad_allreduce`), UsageError if there is no parameter
        of that name. `amp_master_param` has no effect, as in `get_param`.
        """
        self._session.ensure_reduced("reading them")
        parameter, held = self._parameter(name), self._session.parameters
        if held is None:
            return None if parameter.grad is None else parameter.grad.detach().to("cpu", copy=True)
        return self._session.gradient(held.names[name])

    def _parameter(self, name: str) -> torch.Tensor:
        self._session.alive()
        named: dict[str, torch.Tensor] = dict(self._inner.named_parameters(remove_duplicate=False))
        if name in named:
            return named[name]
        raise UsageError(f"the model has no parameter {name!r}; named_parameters(from_global=True) lists them")

    def state_dict(
        self,
        *,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        no_hook: bool = False,
        amp_master_params: bool = True,
        rank0_only: bool = True,
        sharded: bool = False,
        sync_all_ranks: bool | None = None,
    ) -> Any:
        """State of the whole model, including buffers, tied names and extra state, as CPU copies. Collective.

        Before the first call it is the model's own state_dict, on every rank.

        Args:
            destination, prefix: As for `torch.nn.Module.state_dict`.
            keep_vars: UsageError once the model is deployed, because this rank does not hold all parameters.
            rank0_only: Ranks other than 0 get the entries without values: using or saving these is a UsageError.
            sync_all_ranks: The opposite of `rank0_only`, under the name of earlier versions of RaNNC.
            sharded: Return only the tensors that this rank holds, under all their names, without copying; not
                collective. For ``torch.distributed.checkpoint.save``, ``async_save`` and ``load``.
            no_hook: No effect; in RaNNC it left out the hooks of the wrapped model's state_dict. The state is gathered
                in any case.
            amp_master_params: No effect: under torch.amp the parameters are the master copies, and master weights are
                in the optimizer's state.

        Raises:
            UsageError: `keep_vars` after the first call.
            StepError: Ranks are at different places of the script.
        """
        self._session.alive()
        held = self._session.parameters
        everywhere = not rank0_only if sync_all_ranks is None else sync_all_ranks
        options = {"prefix": prefix} if destination is None else {"prefix": prefix, "destination": destination}
        if sharded:
            return own_state(held, self._inner, **options)
        if held is None:
            return self._inner.state_dict(keep_vars=keep_vars, **options)
        return gather_state(
            self._session.world, held, self._inner, everywhere=everywhere, keep_vars=keep_vars, **options
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the state of the whole model, at any time. Collective once deployed: pass the state on every rank.

        Before the first call errors are torch's own, and a model on the meta device gets the values in that call.
        Returns missing and unexpected keys, as `torch.nn.Module.load_state_dict`.

        Raises:
            UsageError: The state does not fit on some rank, or `assign` is set once the model is deployed; no tensor
                was changed on any rank.
        """
        self._session.alive()
        held = self._session.parameters
        if held is None:
            if self._session.values.bare and not assign:
                return load_later(self._session.values, self._inner, state_dict, strict=strict)
            if type(self._inner).load_state_dict is nn.Module.load_state_dict:
                return self._inner.load_state_dict(state_dict, strict, assign)
            return self._inner.load_state_dict(state_dict, strict)  # an override may have no argument `assign`
        return load_state(self._session.world, held, self._inner, state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Called by ``load_state_dict`` of a module that contains this one."""
        mine = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        try:
            keys = self.load_state_dict(mine, strict=False)
        except (RuntimeError, UsageError) as exc:
            error_msgs.append(str(exc))
            return
        missing_keys += [f"{prefix}{name}" for name in keys.missing_keys]
        unexpected_keys += [f"{prefix}{name}" for name in keys.unexpected_keys] if strict else []

    # -- as any module ----------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """No-op with a log line, as `torch.compile` of a RaNNCModule: ranks run graphs of their own."""
        self._told_uncompiled = True
        log.get("RaNNCModule").warning(NOT_COMPILED)

    def __deepcopy__(self, memo: Any) -> RaNNCModule:
        raise UsageError(
            "a RaNNCModule cannot be copied: it belongs to a plan, and each rank may hold only a part of the model. "
            "Copy the model before it is wrapped; for an average of its parameters (EMA), use "
            "pyrannc.AveragedModel(model)"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a RaNNCModule cannot be pickled: each rank may hold only a part of the model. Save "
            "model.state_dict(), or use pyrannc.save_checkpoint"
        )

    def train(self, mode: bool = True) -> RaNNCModule:
        """Set training or evaluation mode; each mode has its own graph, traced when it is first needed."""
        self.training = mode
        self._inner.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the parameters that this rank holds, also those whose reduction is delayed."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)
        self._session.forget_waiting()

    def requires_grad_(self, requires_grad: bool = True) -> RaNNCModule:
        """Set ``requires_grad`` of all parameters of the model."""
        self._inner.requires_grad_(requires_grad)
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over this module, then the wrapped model's modules under their own names."""
        memo = set() if memo is None else memo
        if self not in memo or not remove_duplicate:
            memo.add(self)
            yield prefix, self
            yield from self._inner.named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over the wrapped model's children."""
        yield from self._inner.named_children()

    def apply(self, fn: Callable[[nn.Module], None]) -> RaNNCModule:
        """Apply a function to the modules of the wrapped model."""
        self._inner.apply(fn)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RaNNCModule:
        """Convert the model as `.to(dtype)`, `.half()` and the like do; what would move it has no effect.

        A warning if it would leave the rank's device. UsageError if it changes a dtype of a deployed model.
        """
        device = self._session.world.device
        dtypes = dict.fromkeys(tensor.dtype for tensor in (*self._inner.parameters(), *self._inner.buffers()))
        probes = {dtype: fn(torch.empty(0, dtype=dtype, device=device)) for dtype in dtypes}
        wanted = {dtype: probe.dtype for dtype, probe in probes.items() if probe.dtype != dtype}
        if wanted and self._session.deployment is not None:
            changes = ", ".join(f"{before} to {after}" for before, after in wanted.items())
            raise UsageError(
                f"the model is deployed, and cannot be converted ({changes}) any more: convert it before its first "
                "call, or after model.undeploy() on all ranks; torch.autocast computes in another dtype without it"
            )
        if any(probe.device != device for probe in probes.values()):
            log.get("RaNNCModule").warning(
                "A RaNNCModule cannot be moved: every rank computes on its own device, and the configuration item "
                "`device` chooses between CPU and GPU"
            )
        if wanted:
            self._inner._apply(lambda tensor: tensor.to(wanted.get(tensor.dtype, tensor.dtype)))
        return self

    def drop(self) -> None:
        """Drop deployment and graphs; see `pyrannc.clear`."""
        self._session.close()
        self._calls.stop()
        if self._bypass is not None:
            self._bypass.close()
        registry.leave(self)
        self._session = _Dropped()  # type: ignore[assignment]


def _forward_like(wrapper: RaNNCModule, model: nn.Module) -> Callable[..., Any]:
    """The wrapper's `forward` with the signature of the model's, which data collators and trainers look at."""
    here = weakref.ref(wrapper)  # else only the garbage collector would free a wrapper

    def forward(*args: Any, **kwargs: Any) -> Any:
        module = here()
        if module is None:
            raise StepError("the RaNNCModule that this forward belongs to is gone; keep a reference to it")
        return RaNNCModule.forward(module, *args, **kwargs)

    forward.__doc__ = RaNNCModule.forward.__doc__
    with contextlib.suppress(TypeError, ValueError):  # a forward written in C has none
        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
    return forward


class _Dropped:
    """Replaces the session of a dropped module; every use raises StepError."""

    def __getattr__(self, name: str) -> Any:
        raise StepError("this RaNNCModule was dropped by pyrannc.clear(); wrap the model again")

    def close(self) -> None:
        """No-op."""


def _copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise UsageError(f"{name} is on the meta device and has no values before the model's first call; call it first")
    return tensor.detach().to("cpu", copy=True)


def clear() -> None:
    """Drop all wrapped models of this process, and what plans for them; the ranks stay connected."""
    for module in list(_wrapped):
        module.drop()
    _wrapped.clear()
    plan_ahead.end()
    grad_norm.remove()
    autograd_inputs.remove()
    absent.remove()
    state_elsewhere.remove()
    unknown_optimizer.remove()
    forget_uncompared()
    forget_latest()
    world = made()
    if world is not None:
        world.reads.forget()
    process_flags.delayed = False
    process_flags.keeps_graph = False
