"""The versions of torch that rannd was tried with, and each private name of torch that it uses.

A private name (with a component that begins with one underscore) may change in any release of torch; public ones keep
what they do. So each is a line of `PRIVATE_NAMES`: what it is for, why no public name serves, and which versions have
it. tests/test_torch_versions.py finds uses that have no line, lines without a use, and names that the installed torch
does not have. It passes with 2.11, 2.13, 2.14 and 2.15.

Behind the table stands what differs between the versions: each function and constant says from which version on, or
until which, torch is at fault, and how. What it does is right with later versions, too: there it is not needed.
Everything else of rannd reads the same in all of them. (`torch.autograd.Function.apply` is written in C since 2.15, and
asks nothing in Python; so rannd.graph.modules.autograd_functions watches the nodes that it makes, which all versions
do alike.)
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint

from rannd.patches import declare, install, patched

OLDEST = (2, 11)
NEWEST = (2, 15)
"""The tried range: every minor version from OLDEST to NEWEST."""

_MINOR = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private name of torch that the project uses."""

    name: str
    """Module, class and name. What instances have, and classes have not, is named by the class as well."""
    why: str
    """What it does for rannd, and why nothing public does."""
    since: str = "2.11"
    """First version that has it, as it is used here; 2.11 stands for those before as well."""
    until: str = ""
    """Last version that has it; empty: the newest tried has it."""

    def is_in(self, version: str) -> bool:
        """Whether this version of torch should have it. ValueError where `version` is none."""
        found = minor(version)
        return minor(self.since) <= found and (not self.until or found <= minor(self.until))


class UntriedTorchWarning(UserWarning):
    """The installed torch is none of those that rannd was tried with."""


def minor(version: str) -> tuple[int, int]:
    """Major and minor number of a version of torch: (2, 15) for 2.15.0+cu132, 2.15.0a0+git123, 2.15.1.dev20261101.

    A version before the release of a minor version counts as that. ValueError where it begins with no such numbers.
    """
    found = _MINOR.match(version)
    if found is None:
        raise ValueError(f"{version!r} is no version of torch: it does not begin with two numbers, as 2.15.0 does")
    return int(found[1]), int(found[2])


def doubt(version: str) -> str | None:
    """What to tell users of a version of torch that is outside of the tried range; None inside of it."""
    tried = f"torch {_text(OLDEST)} to {_text(NEWEST)}"
    try:
        found = minor(version)
    except ValueError as exc:
        return f"rannd was tried with {tried}; {exc}, so nobody knows whether it is one of them"
    if OLDEST <= found <= NEWEST:
        return None
    if found < OLDEST:
        return (
            f"rannd was tried with {tried}, this is torch {version}, which is older: names of torch that rannd needs "
            f"are not all there. Install torch {_text(OLDEST)} or later"
        )
    return (
        f"rannd was tried with {tried}, this is torch {version}, which is newer. It may well work: rannd still "
        "checks each of its hooks in torch and each new trace. If something fails, report it with this version, and "
        f"use torch {_text(NEWEST)} meanwhile"
    )


def warn_if_untried(version: str, stacklevel: int = 1) -> None:
    """Give one UntriedTorchWarning where `version` is outside of the tried range.

    `stacklevel`: whose line the warning names, 1 for the caller's, as for `warnings.warn`.
    """
    told = doubt(version)
    if told is not None:
        warnings.warn(told, UntriedTorchWarning, stacklevel=stacklevel + 1)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


PRIVATE_NAMES = (
    # Containers: what torch.export takes calls apart with, and its graphs put together again.
    PrivateName(
        "torch.utils._pytree",
        "The trees that torch.export takes calls apart with. torch has no public module for them.",
    ),
    PrivateName(
        "torch.utils._pytree.GetAttrKey",
        "Part of a path in error messages: an attribute. Registered containers have to give such keys.",
    ),
    PrivateName("torch.utils._pytree.MappingKey", "Part of a path in error messages: a key."),
    PrivateName("torch.utils._pytree.SequenceKey", "Part of a path in error messages: an index."),
    PrivateName(
        "torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE",
        "Which classes a stored structure can be read with, before it is read.",
    ),
    PrivateName(
        "torch.utils._pytree.SUPPORTED_NODES",
        "Which classes are registered, and with what functions: part of a cached trace's key.",
    ),
    PrivateName("torch.utils._pytree.TreeSpec", "The structure of a call's arguments and of what it returns."),
    PrivateName(
        "torch.utils._pytree.TreeSpec._children", "The structures inside of one, for the key of a cached trace."
    ),
    PrivateName(
        "torch.utils._pytree.TreeSpec._context",
        "What a container keeps beside its items, for the key of a cached trace.",
    ),
    PrivateName("torch.utils._pytree.keystr", "Writes a path as Python would, for error messages."),
    PrivateName(
        "torch.utils._pytree.register_pytree_node", "Lets export see into the user's dataclasses and collections."
    ),
    PrivateName(
        "torch.utils._pytree.tree_any",
        "Whether an argument of a recorded operator is one of the constructor's tensors.",
    ),
    PrivateName("torch.utils._pytree.tree_flatten", "Takes arguments and results apart."),
    PrivateName(
        "torch.utils._pytree.tree_flatten_with_path",
        "The same with the path to each value, for names and error messages.",
    ),
    PrivateName("torch.utils._pytree.tree_leaves", "The values in arguments and results."),
    PrivateName("torch.utils._pytree.tree_map", "Replaces the values in arguments."),
    PrivateName("torch.utils._pytree.tree_map_only", "Replaces the tensors in arguments."),
    PrivateName("torch.utils._pytree.tree_unflatten", "Puts arguments and results together again."),
    PrivateName("torch.utils._pytree.treespec_dumps", "A structure as text, for stored traces."),
    PrivateName("torch.utils._pytree.treespec_loads", "The structure of a stored trace."),
    # Operators in graphs: torch.ops gives them, but their classes and what they tell of themselves are private.
    PrivateName("torch._ops.HigherOrderOperator", "Tells operators that run graphs (cond, wrap) from others."),
    PrivateName("torch._ops.OpOverload", "Tells what torch.export leaves in a graph from Python's functions."),
    PrivateName(
        "torch._ops.OpOverload._overloadname", 'Name of an overload, for stored traces; `name()` leaves "default" out.'
    ),
    PrivateName(
        "torch._ops.OpOverload._schema",
        "Which arguments an operator writes, aliases or takes a dtype for; torch tells it nowhere else.",
    ),
    PrivateName("torch._ops.OpOverloadPacket", "Tells torch.ops.aten.add from its overloads, in the user's code."),
    PrivateName("torch._ops.OpOverloadPacket._qualified_op_name", "Name of such a one, for the key of a cached trace."),
    # Tracing: what torch.export does not offer.
    PrivateName(
        "torch._C.DisableTorchFunction",
        "Runs rannd's own tensor code inside of a TorchFunctionMode without being seen by it.",
    ),
    PrivateName(
        "torch._C.DisableTorchFunctionSubclass", "Reads a subclass's own sizes inside of its __torch_function__."
    ),
    PrivateName(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "Tensors inside of vmap and grad have no values that could be looked at.",
    ),
    PrivateName("torch._C._functorch.peek_interpreter_stack", "Whether code runs inside of vmap or grad."),
    PrivateName("torch._C._nn", "Searched for functions of the user's that are torch's (gelu, linear), by name."),
    PrivateName(
        "torch._check", "What tracing decided becomes a check in the graph; its documented name has the underscore."
    ),
    PrivateName("torch._dispatch.python.no_python_dispatcher", "Runs code on real tensors while export traces."),
    PrivateName(
        "torch._dynamo",
        "Attributes that export leaves at the user's tensors begin so; how long its import takes is measured.",
    ),
    PrivateName("torch._subclasses.fake_tensor.FakeTensor", "Tells tensors without values, which export traces with."),
    PrivateName("torch._subclasses.fake_tensor.FakeTensorMode", "Makes such tensors, to prove hooks with."),
    PrivateName(
        "torch.autograd.Function._backward_cls._forward_cls",
        "The custom Function that a node of the autograd graph belongs to: so each call of one is seen.",
    ),
    # Mends of older versions, below.
    PrivateName(
        "torch._C.DispatchKey.CompositeImplicitAutograd", "Names the kernels that export traces through, to mend some."
    ),
    PrivateName("torch._decomp.decompositions", "Has the LSTM that is traced through, which 2.12 gets wrong."),
    PrivateName("torch._ops.OpOverload._op_dk", "Calls the kernel that was there before one of ours."),
    PrivateName("torch._subclasses.fake_impls", "Has the shapes of unique numbers, whose types 2.11 gets wrong."),
    PrivateName("torch._subclasses.fake_impls.op_implementations_dict", "The table of those."),
    PrivateName("torch.nn.functional._infer_size", "A shape in binary_cross_entropy, computed in C++.", until="2.12"),
    PrivateName("torch.ops.aten._unique2.default", "torch.unique, whose types 2.11 gets wrong."),
    PrivateName(
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "What checkpoints that are not reentrant run in; replaced while tracing with 2.11 and 2.12.",
    ),
    PrivateName("torch._tensor", "Searched for functions of the user's that are torch's, by name."),
    PrivateName(
        "torch.distributions.Distribution._validate_args",
        "To put back what set_default_validate_args changes; there is no function that asks.",
    ),
    PrivateName(
        "torch.fx.graph._format_target",
        "Replaced while code is made of graphs whose modules have names that Python does not allow.",
    ),
    PrivateName(
        "torch.overrides._get_current_function_mode_stack",
        "Modes of the user's that change what operators do: part of a cached trace's key.",
    ),
    PrivateName(
        "torch.utils._device.DeviceContext", "The mode of torch.set_default_device among those, which is known."
    ),
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "Sees every operator of a model's constructor on the meta device.",
    ),
    PrivateName(
        "torch.utils._python_dispatch._disable_current_modes", "Runs code on real tensors while export traces."
    ),
    PrivateName(
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "Dispatch modes of the user's: part of a cached trace's key.",
    ),
    PrivateName(
        "torch.utils._sympy.functions",
        "Functions of sizes (FloorDiv, Mod) in traced graphs, by name, for stored traces.",
    ),
    PrivateName("torch.utils._sympy.functions.ToFloat", "A size as a float, in expressions of traced graphs."),
    PrivateName("torch.utils._sympy.symbol.SymT", "Kinds of symbols in traced graphs."),
    PrivateName("torch.utils._sympy.symbol.symbol_is_type", "Tells sizes that depend on data from others."),
    # State of torch that operators depend on: part of a cached trace's key.
    PrivateName("torch._C._get_cudnn_benchmark", "What torch.backends.cudnn.benchmark reads."),
    PrivateName("torch._C._get_cudnn_deterministic", "What torch.backends.cudnn.deterministic reads."),
    PrivateName("torch._C._get_cudnn_enabled", "What torch.backends.cudnn.enabled reads."),
    PrivateName(
        "torch._C._get_deterministic_fill_uninitialized_memory",
        "What torch.utils.deterministic.fill_uninitialized_memory reads.",
    ),
    PrivateName("torch._C._get_mkldnn_enabled", "What torch.backends.mkldnn.enabled reads."),
    # Memory and versions of tensors.
    PrivateName(
        "torch.Tensor._make_wrapper_subclass",
        "A tensor of a subclass, with a shape and no memory: outputs that other ranks have.",
    ),
    PrivateName("torch.Tensor._version", "How often a tensor was written in place: writes by the user are seen."),
    PrivateName(
        "torch.UntypedStorage._cdata",
        "Identity of a memory, the same from all tensors on it; data_ptr is 0 for all on the meta device.",
    ),
    PrivateName(
        "torch._C._storage_Use_Count", "Whether somebody still has a message's memory, before it is used again."
    ),
    PrivateName(
        "torch._C._swap_tensor_impl",
        "Gives a parameter other contents; torch.utils.swap_tensors refuses where somebody refers to it weakly.",
    ),
    PrivateName(
        "torch._conj",
        "Makes the conjugate view of a memory anew, as a constructor left it, whatever the memory's type.",
    ),
    PrivateName("torch._neg_view", "Makes a negated view anew; no public function does."),
    # autograd.
    PrivateName(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "Whether backward was called with retain_graph, from inside of it.",
    ),
    PrivateName(
        "torch._C._will_engine_execute_node",
        "Whether the backward that runs was asked for a parameter (backward(inputs=...)).",
    ),
    PrivateName(
        "torch.autograd._engine_run_backward",
        "Replaced: backward(inputs=...) and autograd.grad find parameters of wrapped models.",
    ),
    PrivateName("torch.Tensor._backward_hooks", "Hooks of register_hook, which are called with reduced gradients."),
    PrivateName(
        "torch.Tensor._post_accumulate_grad_hooks",
        "Hooks of register_post_accumulate_grad_hook, which are called after the reduction.",
    ),
    # Clipping and overflow: many tensors in one call.
    PrivateName("torch._foreach_mul_", "Scales all gradients at once, as torch's own clipping does."),
    PrivateName("torch._foreach_norm", "Norms of all gradients at once."),
    PrivateName(
        "torch.nn.utils.clip_grad._get_total_norm",
        "The norm without torch's checks; also replaced, since torch.nn.utils.clip_grad_norm_ calls this one.",
    ),
    # Modules. What a module has by these names is all there is of it; public functions run hooks, or name fewer.
    PrivateName("torch.nn.Module._apply", "A method that tracing needs not look into."),
    PrivateName("torch.nn.Module._backward_hooks", "Code of the user's that autograd runs."),
    PrivateName("torch.nn.Module._backward_pre_hooks", "Code of the user's that autograd runs before."),
    PrivateName("torch.nn.Module._buffers", "A module's own buffers, to replace them."),
    PrivateName("torch.nn.Module._call_impl", "What torch reads of a module whenever it is called."),
    PrivateName("torch.nn.Module._forward_hooks", "Code of the user's that runs after forward."),
    PrivateName("torch.nn.Module._forward_hooks_always_called", "Which of them run where forward fails."),
    PrivateName("torch.nn.Module._forward_hooks_with_kwargs", "Which of them take keyword arguments."),
    PrivateName("torch.nn.Module._forward_pre_hooks", "Code of the user's that runs before forward."),
    PrivateName("torch.nn.Module._forward_pre_hooks_with_kwargs", "Which of them take keyword arguments."),
    PrivateName("torch.nn.Module._is_full_backward_hook", "Of which kind the backward hooks are."),
    PrivateName("torch.nn.Module._load_from_state_dict", "Whether a class loads its tensors in its own way."),
    PrivateName("torch.nn.Module._load_state_dict_post_hooks", "Whether code of the user's runs after loading."),
    PrivateName("torch.nn.Module._load_state_dict_pre_hooks", "Whether code of the user's runs before loading."),
    PrivateName("torch.nn.Module._modules", "A module's own submodules, also those that are None."),
    PrivateName("torch.nn.Module._non_persistent_buffers_set", "Which buffers a state_dict leaves out."),
    PrivateName("torch.nn.Module._parameters", "A module's own parameters, to replace them."),
    PrivateName("torch.nn.Module._save_to_state_dict", "A method that tracing needs not look into."),
    PrivateName("torch.nn.Module._state_dict_hooks", "Concern saving alone: no part of a cached trace's key."),
    PrivateName("torch.nn.Module._state_dict_pre_hooks", "Concern saving alone: no part of a cached trace's key."),
    PrivateName("torch.nn.Module._wrapped_call_impl", "What torch reads of a module whenever it is called."),
    PrivateName(
        "torch.nn.Module.state_dict._metadata",
        "Versions of modules in a state_dict, which load_state_dict reads: kept in copies.",
    ),
    PrivateName(
        "torch.nn.MultiheadAttention._reset_parameters", "Initialises it; other modules' method has no underscore."
    ),
    PrivateName("torch.nn.Transformer._reset_parameters", "Initialises it, in the same way."),
    PrivateName(
        "torch.nn.RNNBase._flat_weights",
        "The second list of its parameters that a recurrent layer keeps, which has to follow.",
    ),
    PrivateName(
        "torch.nn.modules.batchnorm._NormBase",
        "The layers with running statistics: all batch and instance norms, and SyncBatchNorm.",
    ),
    PrivateName("torch.nn.modules.dropout._DropoutNd", "All layers that drop in training."),
    PrivateName("torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX", "Name of a module's extra state in a state_dict."),
    PrivateName(
        "torch.nn.modules.module._global_backward_hooks", "Hooks of all modules, which a cached trace must not miss."
    ),
    PrivateName(
        "torch.nn.modules.module._global_backward_pre_hooks",
        "Hooks of all modules, which a cached trace must not miss.",
    ),
    PrivateName(
        "torch.nn.modules.module._global_buffer_registration_hooks",
        "Hooks of all modules, of which 2.11 and 2.12 leave some behind.",
    ),
    PrivateName(
        "torch.nn.modules.module._global_forward_hooks", "Hooks of all modules, which a cached trace must not miss."
    ),
    PrivateName(
        "torch.nn.modules.module._global_forward_hooks_always_called", "Which of them run where forward fails."
    ),
    PrivateName("torch.nn.modules.module._global_forward_hooks_with_kwargs", "Which of them take keyword arguments."),
    PrivateName(
        "torch.nn.modules.module._global_forward_pre_hooks", "Hooks of all modules, which a cached trace must not miss."
    ),
    # Ranks and checkpoints.
    PrivateName(
        "torch.distributed.ProcessGroup._get_backend", "NCCL's part of a group, to abort it where a rank has failed."
    ),
    PrivateName(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "Where a tensor lies in torch's checkpoint files: a record of their index.",
    ),
    PrivateName(
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "A record of that index, which is read without unpickling.",
    ),
    PrivateName("torch.serialization._get_layout", "A function that such an index names, and reading it allows."),
    # Operators of ATen with private names: torch's public functions become these in graphs, so that rules name them.
    PrivateName(
        "torch.ops.aten._adaptive_avg_pool2d", "adaptive_avg_pool2d and AdaptiveAvgPool2d, where samples stay apart."
    ),
    PrivateName("torch.ops.aten._adaptive_avg_pool3d", "adaptive_avg_pool3d, in the same way."),
    PrivateName("torch.ops.aten._assert_async", "A check that export adds; dropped."),
    PrivateName("torch.ops.aten._assert_scalar", "A check that export adds; dropped."),
    PrivateName(
        "torch.ops.aten._assert_tensor_metadata",
        "A check that export adds, with the tracing machine's device; dropped.",
    ),
    PrivateName(
        "torch.ops.aten._ctc_loss", "ctc_loss, which has no kernel for fake tensors that suits: rannd registers one."
    ),
    PrivateName("torch.ops.aten._fused_rms_norm", "rms_norm."),
    PrivateName("torch.ops.aten._grouped_mm", "Products of groups of rows, in mixtures of experts."),
    PrivateName("torch.ops.aten._log_softmax", "log_softmax."),
    PrivateName("torch.ops.aten._native_multi_head_attention", "MultiheadAttention's fast path in evaluation."),
    PrivateName("torch.ops.aten._reshape_alias", "reshape."),
    PrivateName("torch.ops.aten._softmax", "softmax."),
    PrivateName("torch.ops.aten._to_copy", "Tensor.to."),
    PrivateName("torch.ops.aten._transformer_encoder_layer_fwd", "TransformerEncoderLayer's fast path in evaluation."),
    PrivateName("torch.ops.aten._unsafe_index", "Indexing without a check, in decompositions."),
    PrivateName("torch.ops.aten._unsafe_index_put", "Writing by index without a check, in decompositions."),
    PrivateName("torch.ops.aten._unsafe_view", "reshape, inside of matmul."),
    PrivateName("torch.ops.aten._upsample_bicubic2d_aa", 'interpolate(mode="bicubic", antialias=True).'),
    PrivateName("torch.ops.aten._upsample_bilinear2d_aa", 'interpolate(mode="bilinear", antialias=True).'),
    PrivateName("torch.ops.aten._upsample_nearest_exact1d", 'interpolate(mode="nearest-exact").'),
    PrivateName("torch.ops.aten._upsample_nearest_exact2d", 'interpolate(mode="nearest-exact") of images.'),
    PrivateName("torch.ops.aten._upsample_nearest_exact3d", 'interpolate(mode="nearest-exact") of volumes.'),
    # What measurements look at.
    PrivateName("torch._inductor", "Whether a start imports it, which it should not (bench/startup.py)."),
    PrivateName("torch.export._trace", "Whether a cached start imports it, which it should not (bench/startup.py)."),
)
"""Each private name of torch that the project uses, a line each."""


def _running() -> tuple[int, int]:
    try:
        return minor(torch.__version__)
    except ValueError:  # told at import; a build of one's own is likely to be a new one
        return NEWEST


VERSION = _running()
"""Of the torch that runs."""

ADAGRAD_BEGINS_AT_ONCE = VERSION < (2, 12)
"""In 2.11 Adagrad gives parameters their state when it is made, and cannot step one that it gets later; from 2.12 on
it does so in the first step."""

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""The kernels that torch traces through, where it follows an operator made of others; nothing else runs them."""


def override_fake(name: str, kernel: Callable[..., Any]) -> None:
    """Register a kernel for fake tensors in place of torch's own.

    2.11 refuses that unless it is told to; later versions take it by default.
    """
    torch.library.register_fake(name, kernel, allow_override=True)


_SHAPES = declare("shapes in C++", torch.nn.functional, "_infer_size", "it takes no symbol for a size", "2.11, 2.12")
_CHECKPOINTS = declare(
    "checkpoints", torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", "cannot be traced", "2.11, 2.12"
)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """What has to be in place while a model is traced, and must not be while it runs.

    Until 2.12 ``F.binary_cross_entropy`` with weights computes a shape in C++ (``_infer_size``), which takes no symbol
    for a size: the number of rows would be fixed. From 2.13 on it is ``broadcast_shapes``, as here; torch.jit, which
    compiles the other, cannot compile this.

    Until 2.12 an export that fails leaves a hook of all modules behind, which holds the model and the graph.
    """
    hooks = torch.nn.modules.module._global_buffer_registration_hooks if VERSION < (2, 13) else {}
    before = set(hooks)
    shapes = (_SHAPES.by(torch.broadcast_shapes),) if hasattr(torch.nn.functional, "_infer_size") else ()
    try:
        with patched(*shapes):
            yield
    finally:
        for key in set(hooks) - before:
            if hooks[key].__module__.startswith("torch."):
                del hooks[key]


def no_recomputing() -> contextlib.AbstractContextManager[None]:
    """Run what the user checkpoints (not reentrant) without it, where torch could not trace it otherwise.

    2.11 keeps the inputs of a checkpoint by an autograd.Function of its own, and looks for them in the autograd graph
    of real tensors, which traced ones do not have. Until 2.12 the hooks of a checkpoint stay in place where an
    exception leaves it, as in a trace that fails: what the model saves for backward later would be recomputed from
    traced tensors. Later versions trace through a checkpoint.
    """
    if VERSION >= (2, 13):
        return contextlib.nullcontext()
    if not hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"):
        raise RuntimeError(
            f"torch {torch.__version__} cannot trace through a checkpoint, and torch.utils.checkpoint has no "
            "_checkpoint_without_reentrant_generator to leave it out by; use torch 2.13 or later"
        )

    def directly(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    return patched(_CHECKPOINTS.by(directly))


def mend_kernels() -> None:
    """Mend what versions of torch say of operators while they are traced: shapes, types, and what they refuse."""
    if VERSION < (2, 13):
        override_fake("aten::embedding", _embedding)
        _mend_lstm()
        torch.ops.aten.cross_entropy_loss.default.py_impl(_COMPOSITE)(_cross_entropy_loss)
    if VERSION < (2, 12):
        for name in ("quantile", "nanquantile"):
            for overload in ("default", "scalar"):
                operator = getattr(getattr(torch.ops.aten, name), overload)
                operator.py_impl(_COMPOSITE)(_quantile if name == "quantile" else _nanquantile)
        _mend_unique()


def _embedding(
    weight: torch.Tensor,
    indices: torch.Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Until 2.12 an embedding of floating-point numbers can be traced, and fails when it runs."""
    torch._check(
        indices.dtype in (torch.int64, torch.int32),
        lambda: (
            f"Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; but "
            f"got {indices.dtype} instead"
        ),
    )
    torch._check(weight.dim() == 2, lambda: "'weight' must be 2-D")
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _mend_lstm() -> None:
    """Until 2.12 the last states of an LSTM have one dimension too many while it is traced: the dimension of the
    samples is squeezed in place of the one in front of it."""

    def one_layer_lstm(
        own: Callable[..., Any], inp: Any, hidden: Any, params: Any, has_biases: bool, reverse: bool = False
    ) -> Any:
        out, last = own(inp, hidden, params, has_biases, reverse=reverse)
        return out, tuple(state.reshape(given.shape) for state, given in zip(last, hidden, strict=True))

    home = torch._decomp.decompositions
    install(
        declare("the LSTM", home, "one_layer_lstm", "traced with wrong shapes", "2.11, 2.12").around(one_layer_lstm)
    )


def _cross_entropy_loss(
    self: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Until 2.12 targets that are probabilities fix the number of samples: sizes of tensors are asked for as numbers.
    What this does is what torch's own kernel does (aten/src/ATen/native/LossNLL.cpp)."""
    if self.dim() != target.dim() or self.shape != target.shape:  # classes
        operator: Any = torch.ops.aten.cross_entropy_loss.default
        loss: torch.Tensor = operator._op_dk(_COMPOSITE, self, target, weight, reduction, ignore_index, label_smoothing)
        return loss
    torch._check(target.is_floating_point(), lambda: f"Expected floating point type for target, got {target.dtype}")
    torch._check(ignore_index < 0, lambda: "ignore_index is not supported for floating point target")
    place = 0 if self.dim() == 1 else 1
    classes = self.shape[place]
    if label_smoothing > 0:
        torch._check(label_smoothing <= 1, lambda: f"label_smoothing must be in [0, 1]. Got: {label_smoothing}")
        target = target * (1 - label_smoothing) + label_smoothing / classes
    terms = self.log_softmax(place, self.dtype) * target
    if weight is not None:
        torch._check(
            weight.dim() == 1 and weight.shape[0] == classes,
            lambda: f"weight tensor should be defined either for all {classes} classes or no classes",
        )
        terms = terms * weight.reshape(-1, *[1] * (self.dim() - place - 1))
    if reduction == 0:
        return -terms.sum(place)
    return -terms.sum() if reduction == 2 else -terms.sum() / (self.numel() // classes)


def _quantile(
    self: torch.Tensor,
    q: torch.Tensor | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
    skip_nan: bool = False,
) -> torch.Tensor:
    """In 2.11 the number of elements has to be a number, not a symbol. What this does is what torch's own kernel does
    (aten/src/ATen/native/Sorting.cpp)."""
    whole = dim is None or self.dim() == 0
    place = 0 if dim is None else dim
    values = (self.reshape(-1) if whole else self.movedim(place, -1)).sort(-1).values
    wanted = q if isinstance(q, torch.Tensor) else torch.full((), q, dtype=self.dtype, device=self.device)
    ranks = wanted.reshape(-1)
    last = values.shape[-1] - 1
    missing = values.isnan()
    if skip_nan:
        counts = (~missing).sum(-1, keepdim=True)
        ranks = (ranks * (counts - 1)).clamp(min=0)
    else:
        ranks = torch.where(missing.any(-1, keepdim=True), last, ranks * last)
    if interpolation in ("lower", "higher", "nearest"):
        ranks = {"lower": torch.floor, "higher": torch.ceil, "nearest": torch.round}[interpolation](ranks)
    below = values.gather(-1, ranks.long())
    if interpolation in ("linear", "midpoint"):
        share = ranks - ranks.floor() if interpolation == "linear" else torch.full_like(ranks, 0.5)
        below = below.lerp(values.gather(-1, ranks.ceil().long()), share)
    below = below.movedim(-1, 0) if wanted.dim() else below.squeeze(-1)
    if not keepdim or self.dim() == 0:
        return below
    if whole:
        return below.reshape(*below.shape[: wanted.dim()], *[1] * self.dim())
    return below.unsqueeze(place % self.dim() + wanted.dim())


def _nanquantile(
    self: torch.Tensor,
    q: torch.Tensor | float,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    interpolation: str = "linear",
) -> torch.Tensor:
    return _quantile(self, q, dim, keepdim, interpolation=interpolation, skip_nan=True)


def _mend_unique() -> None:
    """In 2.11 the places and counts of unique numbers have the type of the numbers while they are traced."""
    from torch._subclasses import fake_impls

    for operator in (
        torch.ops.aten._unique2.default,
        torch.ops.aten.unique_dim.default,
        torch.ops.aten.unique_consecutive.default,
    ):
        own = fake_impls.op_implementations_dict[operator]
        fake_impls.op_implementations_dict[operator] = _whole_numbers(own)


def _whole_numbers(own: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(fake_mode: Any, *args: Any, **kwargs: Any) -> Any:
        values, *others = own(fake_mode, *args, **kwargs)
        with fake_mode:
            return values, *(other.new_empty(other.shape, dtype=torch.int64) for other in others)

    return kernel
