"""Rules and limits: which state of a model the cache key of its trace and the guard of a call include.

One table for both: state in the key that may change between two calls of a process is in the guard, too. Where only
one of them includes something, `ONE_SIDED` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from rannd.device.autocast import AUTOCAST_TYPES
from rannd.device.kernel_flags import matmul_precisions
from rannd.graph.fingerprint.introspect import vars_of

# -- limits ----------------------------------------------------------------------------------------------------------

KEY_ITEMS = 200_000
"""Maximum number of values in one container for the key."""
KEY_VALUES = 1_000_000
"""Maximum number of values in all for the key."""
KEY_BYTES = 16 * 2**20
"""Maximum bytes of tensors, arrays and byte strings in all for the key."""
GUARD_ITEMS = (256, 64, 64, 64)
"""Maximum number of items that the guard, which runs in every call, reads of a container, by depth: in an attribute,
nested in that, and so on."""
GUARD_LEVELS = len(GUARD_ITEMS)
GUARD_PLAIN_ITEMS = 10_000
"""Maximum number of items that the guard reads of a container of numbers or strings only, which it compares as one."""
GUARD_VALUES, GUARD_VALUES_OF_ONE = 40_000, 4_000
"""Maximum number of values in objects that the guard reads, in all and per attribute."""
UNDO_VALUES = 200_000
"""Maximum number of values in objects that are recorded to be restored after user code has run."""
GUARD_BYTES = 2**16
"""Maximum bytes of an array that the guard reads."""
UNDO_ELEMENTS = 1 << 24
"""Maximum number of elements of a tensor or array that is copied to be restored; larger ones are taken for data."""
LIBRARY_LEVELS = 4
"""Maximum depth to which values in a library's namespace are searched for user functions."""


# -- modules ---------------------------------------------------------------------------------------------------------


class ModulePart(Enum):
    """How an attribute that every nn.Module has is compared."""

    VALUE = "by value"
    TENSORS = "names, and for each tensor its identity and the properties in `TENSOR`"
    MODULES = "names and identities; the submodules are compared as modules of the model"
    NAMES = "as a set of names"
    HOOKS = "each hook, in order, with its flags"
    FLAGS = "together with the hooks that it belongs to"
    SAVING = "not at all: neither a call nor tracing reads it"


MODULE_PARTS = {
    "training": ModulePart.VALUE,
    "_is_full_backward_hook": ModulePart.VALUE,
    "_parameters": ModulePart.TENSORS,
    "_buffers": ModulePart.TENSORS,
    "_non_persistent_buffers_set": ModulePart.NAMES,
    "_modules": ModulePart.MODULES,
    "_forward_hooks": ModulePart.HOOKS,
    "_forward_hooks_with_kwargs": ModulePart.FLAGS,
    "_forward_hooks_always_called": ModulePart.FLAGS,
    "_forward_pre_hooks": ModulePart.HOOKS,
    "_forward_pre_hooks_with_kwargs": ModulePart.FLAGS,
    "_backward_hooks": ModulePart.HOOKS,
    "_backward_pre_hooks": ModulePart.HOOKS,
    "_state_dict_hooks": ModulePart.SAVING,
    "_state_dict_pre_hooks": ModulePart.SAVING,
    "_load_state_dict_pre_hooks": ModulePart.SAVING,
    "_load_state_dict_post_hooks": ModulePart.SAVING,
}
"""The attributes that `nn.Module.__init__` sets. All other attributes of a module are compared by their contents."""

HOOK_FLAGS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
"""Containers of hooks, and those of their flags. Their keys are not compared, since torch numbers hooks per process:
a hook that is removed and registered again is the same."""

IGNORED = {
    ("transformers.generation.configuration_utils", "GenerationConfig"): frozenset({"_original_object_hash"}),
    # Numbers of all hooks that the process has registered; a rank registers other ones than rank 0.
    ("torch.utils.hooks", "RemovableHandle"): frozenset({"id", "next_id", "hooks_dict_ref", "extra_dict_ref"}),
}
"""Attributes of objects and classes that differ between processes and are read only for saving or removing."""

DERIVED = {
    ("torch.nn.modules.rnn", "RNNBase"): frozenset({"_flat_weights", "_flat_weight_refs"}),
    ("transformers.modeling_utils", "PreTrainedModel"): frozenset({"_output_capturing_hooks_installed"}),
    ("transformers.configuration_utils", "PreTrainedConfig"): frozenset({"problem_type"}),
    ("transformers.configuration_utils", "PretrainedConfig"): frozenset({"problem_type"}),
}
"""Attributes that forward derives again in each call, by the class that has them: an RNN's list of its weights, which
are others while a model is traced, the mark of a model whose forward has registered hooks that collect outputs (which
are taken off it after tracing), and the loss that the labels of a classification need, as long as none is set. A graph
does what forward does with them, so that nothing is lost if they are not assigned."""

IGNORED_OF_TENSORS = ("_dynamo", "_rannd_")
"""Prefixes of attributes that torch.export and rannd's runtime leave on tensors."""

IGNORED_OF_FUNCTIONS = frozenset({"__dynamo_disable", "_torchdynamo_wrapper_id"})
"""Attributes in which torch notes, when a function is first called, what its compiler makes of it, and an id."""

TENSOR = ("class", "dtype", "shape", "requires_grad", "attributes")
"""Properties of a tensor in both, beside its identity (guard) or its values and name (key)."""

TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
"""Plain tensor classes, in contrast to tensor subclasses."""

STANDS_FOR = "_rannd_stands_for"
"""Attribute of classes that tensors of other ranks have for a while: their own class."""


def class_of(kind: type) -> type:
    """The class that a tensor of class `kind` has for the user's code."""
    found: type = vars_of(kind).get(STANDS_FOR, kind)
    return found


ONE_SIDED = {
    "device and strides of a tensor": "key only: deploying a model moves tensors to other memory between calls",
    "memory that tensors share": "key only: for the same reason as strides",
    "values of a tensor in an attribute": "key only: a graph reads the tensor itself in each call, and a branch on its "
    "values is decided in each call",
    "identity of an object": "guard only: identities differ between processes; the key has the contents of the object",
    "bytecode, annotations and bases of classes": "key only: code in a process is replaced, not changed, and the guard "
    "compares functions and classes by identity",
    "globals, attributes of classes": "key only: the guard would have to follow all code in each call",
    "order of attributes": "key only: an attribute that is deleted and set again has not changed",
    "values beyond the limits": "key only: the guard stops at its limits; beyond those of the key there is no key",
    "what no object shows": "there is no key; the guard has the identity",
    "objects of torch's and Python's machinery inside other objects": "key only, if at all: optimizers, locks and "
    "queues change in every step, and must not be restored after tracing",
    "what hooks of all modules hold": "key only: the tracer's own hooks are among them during tracing",
}
"""State that only one of the two includes, and why."""

INTERNAL = frozenset(MODULE_PARTS) | {"__class__"}
"""Entries of a module's state that are not user attributes."""


# -- the process -----------------------------------------------------------------------------------------------------

SWITCHES: dict[str, Callable[[], Any]] = {
    "autocast dtypes": lambda: [torch.get_autocast_dtype(device) for device in AUTOCAST_TYPES],
    "autocast cache": torch.is_autocast_cache_enabled,
    "inference": torch.is_inference_mode_enabled,
    "dtype": torch.get_default_dtype,
    "device": torch.get_default_device,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "warn only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill": torch._C._get_deterministic_fill_uninitialized_memory,
    "anomaly": torch.is_anomaly_enabled,
    "matmul": matmul_precisions,
    "sdp": lambda: [
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ],
    "mkldnn": torch._C._get_mkldnn_enabled,
    "cudnn": lambda: [
        torch._C._get_cudnn_enabled(), torch._C._get_cudnn_benchmark(), torch._C._get_cudnn_deterministic()
    ],
    "fast path": torch.backends.mha.get_fastpath_enabled,
    "einsum": lambda: [torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy],
}  # fmt: skip
"""Global settings of torch that influence which operators are traced, except those in `signature.Mode`."""


def switches() -> dict[str, Any]:
    """Present values of torch's global settings."""
    return {name: read() for name, read in SWITCHES.items()}


def modes_around() -> list[Any]:
    """Active TorchFunctionMode and TorchDispatchMode objects, which see and may change every operator."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def global_hooks() -> list[tuple[str, str, Any]]:
    """List (container, flags, hook) of the registered global module hooks, as HOOK_FLAGS does for those of a module."""
    containers: tuple[tuple[str, dict[int, Any], tuple[dict[int, bool], ...]], ...] = (
        ("_forward_pre_hooks", torch_modules._global_forward_pre_hooks, ()),
        (
            "_forward_hooks",
            torch_modules._global_forward_hooks,
            (torch_modules._global_forward_hooks_with_kwargs, torch_modules._global_forward_hooks_always_called),
        ),
        ("_backward_hooks", torch_modules._global_backward_hooks, ()),
        ("_backward_pre_hooks", torch_modules._global_backward_pre_hooks, ()),
    )
    return [
        (name, "".join(f"{key in each:d}" for each in flagged), hook)
        for name, hooks, flagged in containers
        for key, hook in hooks.items()
    ]
