"""The planner's options for a job: the configuration, within what the job's optimizer and compiling allow."""

from __future__ import annotations

import msgspec

from rannd.errors import UsageError
from rannd.plan.plan_options import AUTO, PlanOptions
from rannd.runtime.comm.context import Context
from rannd.runtime.optim.coupling import NOT_DIVIDED, check_masters, check_offload, divides, may_offload


def job_options(context: Context) -> PlanOptions:
    """The options of a job. UsageError where the configuration asks for what the optimizer cannot do."""
    config = context.config
    if config.master_weights:
        check_masters(context.model, context.optimizer)
    zero, offload = _zero_stage(context), _offload_optimizer(context)
    return msgspec.structs.replace(
        PlanOptions.of(config),
        zero_stage=zero,
        offload_optimizer=offload,
        device=context.world.device.type,
        divides=(zero, config.zero_stage) != ("0", AUTO),
        offload_params=_offload_params(context, zero),
        steps_apart=(offload, config.offload_optimizer) != ("false", AUTO),
    )


def _zero_stage(context: Context) -> str:
    """The item `zero_stage`; '0' in place of 'auto' where the optimizer cannot step parts of parameters.

    UsageError where it would have to.
    """
    asked, optimizer = context.config.zero_stage, context.optimizer
    if asked == "0":
        return asked
    if optimizer is None:
        if asked != "auto":
            raise UsageError(f"zero_stage={asked} divides the optimizer's state: RaNNCModule(model, optimizer)")
        return "0"
    if not divides(optimizer):
        if asked != "auto":
            raise UsageError(NOT_DIVIDED.format(type(optimizer).__name__))
        return "0"
    return asked


def _offload_optimizer(context: Context) -> str:
    """The item `offload_optimizer`; 'false' in place of 'auto' where the optimizer cannot step its parameters apart.

    UsageError where it would have to.
    """
    asked, optimizer = context.config.offload_optimizer, context.optimizer
    if asked == "true":
        check_offload(optimizer)
    return "false" if asked == AUTO and not may_offload(optimizer) else asked


def _offload_params(context: Context, zero: str) -> str:
    """The item `offload_params`; 'false' in place of 'auto' where parameters cannot be divided.

    UsageError where they would have to. `zero` is the item `zero_stage`, as `_zero_stage` returns it.
    """
    asked, optimizer = context.config.offload_params, context.optimizer
    compiled = context.config.compile_stages != "off"  # which has whole parameters, all at once
    if asked != "true":
        undivided = optimizer is None or (zero, context.config.zero_stage) == ("0", AUTO)
        return "false" if asked == AUTO and (undivided or compiled) else asked
    if compiled:
        raise UsageError(
            f"offload_params=true and compile_stages={context.config.compile_stages}: stages are compiled with all of "
            "their parameters in memory; set compile_stages=off"
        )
    if optimizer is None:
        raise UsageError("offload_params=true needs the optimizer: RaNNCModule(model, optimizer)")
    if not divides(optimizer):
        raise UsageError(NOT_DIVIDED.format(type(optimizer).__name__))
    return asked
