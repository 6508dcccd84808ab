"""What of a model's state counts, for the key of its trace and for the guard of a call, and how far each one reads.

One table for both: what the key sees and may change between two calls of a process, the guard sees as well. Where only
one of them sees something, `ONE_SIDED` says why.
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

# -- limits ----------------------------------------------------------------------------------------------------------

KEY_ITEMS = 200_000
"""Values of one container that the key reads."""
KEY_VALUES = 1_000_000
"""Values that the key reads, in sum."""
KEY_BYTES = 16 * 2**20
"""Bytes of tensors, arrays and byte strings that the key reads, in sum."""
GUARD_ITEMS = (256, 64, 64, 64)
"""So many items the guard reads, which runs in every call: of what is an attribute, of what is in that, and so on."""
GUARD_LEVELS = len(GUARD_ITEMS)
GUARD_PLAIN_ITEMS = 10_000
"""Items of a container that holds numbers or texts only, which are read at once."""
GUARD_VALUES, GUARD_VALUES_OF_ONE = 40_000, 4_000
"""Values in objects that the guard reads, in sum, and of one attribute."""
UNDO_VALUES = 200_000
"""Values in objects that are looked at, to put them back after code has run."""
GUARD_BYTES = 2**16
"""Bytes of an array that the guard reads."""
UNDO_ELEMENTS = 1 << 24
"""Elements of the largest tensor, or array, whose values are kept while code runs; what is larger is data."""
LIBRARY_LEVELS = 4
"""How far values of a library's namespace are followed in search of the user's functions."""


# -- modules ---------------------------------------------------------------------------------------------------------


class ModulePart(Enum):
    """How one of the attributes that every module has counts."""

    VALUE = "by its value"
    TENSORS = "names, and of each tensor its identity and what `TENSOR` names"
    MODULES = "names and identities; the modules inside are modules of the model themselves"
    NAMES = "a set of names"
    HOOKS = "each hook, in order, with its flags"
    FLAGS = "with the hooks that it is about"
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
"""The attributes that `nn.Module.__init__` makes. All other attributes of a module count by what they hold."""

HOOK_FLAGS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
"""Containers of hooks, and what flags them. Keys are numbers of the process: a hook that is removed and registered
again is the same."""

IGNORED = {
    ("transformers.generation.configuration_utils", "GenerationConfig"): frozenset({"_original_object_hash"}),
}
"""Attributes that differ from process to process and that only saving reads."""

IGNORED_OF_TENSORS = ("_dynamo",)
"""So begin attributes that torch.export leaves on tensors."""

TENSOR = ("class", "dtype", "shape", "requires_grad", "attributes")
"""What both see of a tensor, beside its identity (the guard) or its values and its name (the key)."""

TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
"""The classes whose tensors are nothing but tensors."""

ONE_SIDED = {
    "device and strides of a tensor": "key: deploying a model moves tensors and gives them other memory, between calls",
    "memory that tensors share": "key: as their strides",
    "values of a tensor in an attribute": "key: a graph reads the tensor itself in each call; a branch on its values "
    "is decided in each call",
    "identity of an object": "guard: other processes have other identities; what the object holds is in the key",
    "bytecode, annotations and bases of classes": "key: code that is there does not change, it is replaced, and "
    "functions and classes count by identity",
    "globals, attributes of classes": "key: the guard would follow all code in each call",
    "order of attributes": "key: deleting an attribute and setting it again is no change",
    "values beyond the limits": "guard: not seen; the key reads them, or there is none",
    "what no object shows": "there is no key; the guard sees the identity",
    "objects of torch's and Python's machinery inside other objects": "key, if at all: optimizers, locks and queues "
    "change in every step, and nobody may put them back after tracing",
    "what hooks of all modules hold": "key: the tracer's own are among them while it traces",
}
"""What one of the two sees alone, and why."""

INTERNAL = frozenset(MODULE_PARTS) | {"__class__"}
"""What is seen of every module, and is none of the user's attributes."""


# -- the process -----------------------------------------------------------------------------------------------------

SWITCHES: dict[str, Callable[[], Any]] = {
    "autocast dtypes": lambda: [torch.get_autocast_dtype(device) for device in ("cpu", "cuda")],
    "autocast cache": torch.is_autocast_cache_enabled,
    "inference": torch.is_inference_mode_enabled,
    "dtype": torch.get_default_dtype,
    "device": torch.get_default_device,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "warn only": torch.is_deterministic_algorithms_warn_only_enabled,
    "fill": torch._C._get_deterministic_fill_uninitialized_memory,
    "anomaly": torch.is_anomaly_enabled,
    "matmul": torch.get_float32_matmul_precision,
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
"""Switches of torch that decide which operators a model's code becomes. What a `Mode` has is not among them."""


def switches() -> dict[str, Any]:
    """The switches of torch as they are now."""
    return {name: read() for name, read in SWITCHES.items()}


def modes_around() -> list[Any]:
    """The modes that the call runs inside, which see or change every operator."""
    return [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]


def global_hooks() -> list[tuple[str, str, Any]]:
    """(container, flags, hook) of the hooks of all modules that there are now, as HOOK_FLAGS has those of one."""
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
