"""What a `RaNNCModule` answers to other libraries that wrap, compile, export or prepare a module."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY

from rannd import log
from rannd.errors import UsageError
from rannd.graph.fingerprint.state_rules import HOOK_FLAGS

NOT_COMPILED = (
    "torch.compile of a RaNNCModule compiles nothing: ranks run graphs of their own. Set "
    'compile_stages="blocks" (RANNC_COMPILE_STAGES) instead'
)
COMPILED_INSIDE = (
    "torch.compile of the wrapped model has no effect: rannd runs the operators of its graph. Set "
    'compile_stages="blocks" (RANNC_COMPILE_STAGES) instead'
)
NOT_EXPORTED = (
    "torch.export or torch.jit.trace of the model inside a RaNNCModule: its calls run a plan, which they cannot "
    "follow; export it in evaluation, after model.undeploy() on all ranks"
)


class _NoOtherWrapper(dict[str, Any]):
    """What torch asks whether FSDP or the like may be applied to a module; the answer is an error."""

    def __contains__(self, name: object) -> bool:
        raise UsageError(
            "FullyShardedDataParallel(RaNNCModule(..)), fully_shard(..) or replicate(..): a RaNNCModule divides its "
            "model into stages and averages gradients over all ranks itself; use it without another wrapper. (Also "
            "torch.distributed.checkpoint.state_dict ends here: in place of get_model_state_dict(model) call "
            "model.state_dict())"
        )


def original(model: Any) -> Any:
    """The module that torch.compile was given, for what it returned; anything else as it is."""
    dynamo = sys.modules.get("torch._dynamo")  # imported by torch.compile; it takes a second
    while dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        if any(getattr(model, hooks) for hooks in HOOK_FLAGS):
            raise UsageError(
                "the module that torch.compile returned has hooks, which calls of a RaNNCModule do not run: register "
                "them on the module that it was given, and wrap that one"
            )
        model = model._orig_mod
    return model


def refuse_sharding(wrapper: nn.Module) -> None:
    """Let FSDP and the like raise UsageError when they are applied to `wrapper`."""
    wrapper.__dict__[REGISTRY_KEY] = _NoOtherWrapper()


def refuse_data_parallel(attribute: str) -> None:
    """UsageError at the attribute that DistributedDataParallel looks at first."""
    if attribute == "_ddp_params_and_buffers_to_ignore":
        raise UsageError(
            "DistributedDataParallel(RaNNCModule(..)): a RaNNCModule averages gradients over all ranks itself; use it "
            "without DistributedDataParallel"
        )


def refuse_trainer(attribute: str) -> None:
    """UsageError at an attribute that Hugging Face's Trainer looks at first: it would save on rank 0 alone."""
    if attribute == "hf_device_map" and sys._getframe(2).f_globals.get("__name__") == "transformers.trainer":
        raise UsageError(
            "transformers.Trainer(model=RaNNCModule(..)): use pyrannc.integrations.transformers.RaNNCTrainer instead, "
            "with the model itself, which it wraps"
        )


def warn_of_mixed_precision() -> None:
    """Warn, when Accelerate prepares a RaNNCModule, that its mixed_precision is left to the script."""
    accelerate: Any = sys.modules.get("accelerate")
    precision = str(accelerate.state.AcceleratorState().mixed_precision) if accelerate is not None else "no"
    if precision != "no":
        log.get("RaNNCModule").warning(
            "Accelerate's mixed_precision=%r does not reach a RaNNCModule: call it inside accelerator.autocast()",
            precision,
        )
