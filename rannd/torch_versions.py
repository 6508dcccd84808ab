"""Supported versions of torch, and the private names of torch that rannd uses.

A private name (one with a component that begins with a single underscore) may change in any release of torch. So each
has an entry in `PRIVATE_NAMES`: what it is used for, why no public name serves, and which versions have it.
tests/test_torch_versions.py reports uses without an entry, entries without a use, and names that the installed torch
does not have. It passes with 2.11, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

OLDEST = (2, 11)
NEWEST = (2, 15)
"""The tested range: every minor version from OLDEST to NEWEST."""

_MINOR = re.compile(r"(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A private name of torch that the project uses."""

    name: str
    """Qualified name; attributes that only instances have are also listed under their class."""
    why: str
    """What it is used for, and why no public name serves."""
    since: str = "2.11"
    """First version that has it in the form used here; 2.11 includes earlier versions."""
    until: str = ""
    """Last version that has it; empty: the newest tested version has it."""

    def is_in(self, version: str) -> bool:
        """Whether a version of torch should have it. ValueError if `version` is not a version number."""
        found = minor(version)
        return minor(self.since) <= found and (not self.until or found <= minor(self.until))


class UntriedTorchWarning(UserWarning):
    """Warning that rannd was not tested with the installed version of torch."""


def minor(version: str) -> tuple[int, int]:
    """Major and minor number of a version of torch: (2, 15) for 2.15.0+cu132, 2.15.0a0+git123, 2.15.1.dev20261101.

    A pre-release counts as its minor version. ValueError if `version` does not begin with two numbers.
    """
    found = _MINOR.match(version)
    if found is None:
        raise ValueError(f"{version!r} is not a version of torch: it does not begin with two numbers, as 2.15.0 does")
    return int(found[1]), int(found[2])


def doubt(version: str) -> str | None:
    """Warning text for a version of torch outside the tested range; None for a version inside it."""
    tried = f"torch {_text(OLDEST)} to {_text(NEWEST)}"
    try:
        found = minor(version)
    except ValueError as exc:
        return f"rannd was tested with {tried}; {exc}, so it is unknown whether this version is one of them"
    if OLDEST <= found <= NEWEST:
        return None
    if found < OLDEST:
        return (
            f"rannd was tested with {tried}; this is torch {version}, which is older and lacks names that rannd needs. "
            f"Install torch {_text(OLDEST)} or later"
        )
    return (
        f"rannd was tested with {tried}; this is torch {version}, which is newer. It may work, because rannd checks "
        "its hooks in torch and each new trace. If something fails, report it with this version, and use torch "
        f"{_text(NEWEST)} meanwhile"
    )


def warn_if_untried(version: str, stacklevel: int = 1) -> None:
    """Issue an UntriedTorchWarning if `version` is outside the tested range.

    `stacklevel`: as for `warnings.warn`; 1 is the line of the caller.
    """
    told = doubt(version)
    if told is not None:
        warnings.warn(told, UntriedTorchWarning, stacklevel=stacklevel + 1)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


PRIVATE_NAMES = (
    # Pytrees: how torch.export flattens arguments and results.
    PrivateName(
        "torch.utils._pytree",
        "The pytrees by which torch.export flattens calls. torch has no public module for them.",
    ),
    PrivateName(
        "torch.utils._pytree.GetAttrKey",
        "Part of a path in error messages: an attribute. Registered containers have to return such keys.",
    ),
    PrivateName("torch.utils._pytree.MappingKey", "Part of a path in error messages: a key."),
    PrivateName("torch.utils._pytree.SequenceKey", "Part of a path in error messages: an index."),
    PrivateName(
        "torch.utils._pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE",
        "Checks which classes a stored TreeSpec may refer to, before it is loaded.",
    ),
    PrivateName(
        "torch.utils._pytree.SUPPORTED_NODES",
        "Registered classes and their functions: part of a cached trace's key.",
    ),
    PrivateName("torch.utils._pytree.TreeSpec", "The structure of a call's arguments and results."),
    PrivateName("torch.utils._pytree.TreeSpec._children", "Nested TreeSpecs, for the key of a cached trace."),
    PrivateName(
        "torch.utils._pytree.TreeSpec._context",
        "Data of a container besides its items, for the key of a cached trace.",
    ),
    PrivateName("torch.utils._pytree.keystr", "Formats a path as Python code, for error messages."),
    PrivateName(
        "torch.utils._pytree.register_pytree_node", "Lets export flatten the user's dataclasses and collections."
    ),
    PrivateName(
        "torch.utils._pytree.tree_any",
        "Whether an argument of a recorded operator is one of the constructor's tensors.",
    ),
    PrivateName("torch.utils._pytree.tree_flatten", "Flattens arguments and results."),
    PrivateName(
        "torch.utils._pytree.tree_flatten_with_path",
        "As tree_flatten, with the path to each value, for names and error messages.",
    ),
    PrivateName("torch.utils._pytree.tree_leaves", "The values in arguments and results."),
    PrivateName("torch.utils._pytree.tree_map", "Replaces the values in arguments."),
    PrivateName("torch.utils._pytree.tree_map_only", "Replaces the tensors in arguments."),
    PrivateName("torch.utils._pytree.tree_unflatten", "Rebuilds arguments and results."),
    PrivateName("torch.utils._pytree.treespec_dumps", "Serializes a TreeSpec, for stored traces."),
    PrivateName("torch.utils._pytree.treespec_loads", "Deserializes the TreeSpec of a stored trace."),
    # Operators in graphs: torch.ops is public, but the operators' classes and attributes are private.
    PrivateName("torch._ops.HigherOrderOperator", "Distinguishes operators that run graphs (cond, wrap) from others."),
    PrivateName("torch._ops.OpOverload", "Distinguishes ATen operators in exported graphs from Python functions."),
    PrivateName(
        "torch._ops.OpOverload._overloadname", 'Name of an overload, for stored traces; `name()` omits "default".'
    ),
    PrivateName(
        "torch._ops.OpOverload._schema",
        "Which arguments an operator writes, aliases or takes a dtype for; there is no public equivalent.",
    ),
    PrivateName(
        "torch._ops.OpOverloadPacket", "Distinguishes torch.ops.aten.add from its overloads, in the user's code."
    ),
    PrivateName(
        "torch._ops.OpOverloadPacket._qualified_op_name", "Name of an overload packet, for the key of a cached trace."
    ),
    # Tracing: functions that torch.export does not offer.
    PrivateName(
        "torch._C.DisableTorchFunction",
        "Runs rannd's own tensor code inside a TorchFunctionMode without being intercepted by it.",
    ),
    PrivateName(
        "torch._C._disabled_torch_function_impl", "Lets a tensor of which there is a piece see operators only."
    ),
    PrivateName("torch._C.DisableTorchFunctionSubclass", "Reads a subclass's sizes inside its __torch_function__."),
    PrivateName(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "Whether a tensor is inside vmap or grad, where values cannot be read.",
    ),
    PrivateName("torch._C._functorch.peek_interpreter_stack", "Whether code runs inside vmap or grad."),
    PrivateName("torch._C._nn", "Searched for torch's functions (gelu, linear) used by the user's code, by name."),
    PrivateName(
        "torch._check", "Adds a check of a traced decision to the graph; documented, although it has an underscore."
    ),
    PrivateName("torch._dispatch.python.no_python_dispatcher", "Runs code on real tensors during export."),
    PrivateName(
        "torch._dynamo",
        "Prefix of attributes that export leaves on the user's tensors; the time of its import is measured.",
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensor", "Recognizes fake tensors, which have no values, during export."
    ),
    PrivateName(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "Creates fake tensors, to check the tracer's hooks, and to find out strides.",
    ),
    PrivateName(
        "torch.autograd.Function._backward_cls._forward_cls",
        "The custom Function of a node of the autograd graph, to detect calls of custom Functions.",
    ),
    # Workarounds for older versions, see below.
    PrivateName(
        "torch._C.DispatchKey.CompositeImplicitAutograd",
        "Key of the composite kernels that export traces through, some of which are replaced.",
    ),
    PrivateName("torch._decomp.decompositions", "Contains the decomposition of LSTM, which is wrong in 2.12."),
    PrivateName("torch._ops.OpOverload._op_dk", "Calls the original kernel of an operator with a replaced one."),
    PrivateName(
        "torch._subclasses.meta_utils.MetaTensorDescriber",
        "Says on which device export sees a tensor: on the job's, wherever it is.",
    ),
    PrivateName("torch._subclasses.fake_impls", "Contains fake kernels of unique, whose dtypes are wrong in 2.11."),
    PrivateName("torch._subclasses.fake_impls.op_implementations_dict", "The table of fake kernels."),
    PrivateName("torch.nn.functional._infer_size", "A shape in binary_cross_entropy, computed in C++.", until="2.12"),
    PrivateName("torch.ops.aten._unique2.default", "torch.unique, whose dtypes are wrong in 2.11."),
    PrivateName(
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "Implementation of non-reentrant checkpoints; replaced while tracing with 2.11 and 2.12.",
    ),
    PrivateName("torch._tensor", "Searched for torch's functions used by the user's code, by name."),
    PrivateName(
        "torch.distributions.Distribution._validate_args",
        "Reads the flag of set_default_validate_args, to restore it; there is no public getter.",
    ),
    PrivateName(
        "torch.fx.graph._format_target",
        "Replaced while generating code of graphs whose modules have names that are no Python identifiers.",
    ),
    PrivateName(
        "torch.overrides._get_current_function_mode_stack",
        "The user's modes that change operators: part of a cached trace's key.",
    ),
    PrivateName(
        "torch.utils._device.DeviceContext", "Recognizes the mode of torch.set_default_device among these modes."
    ),
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "Intercepts every operator of a model's constructor on the meta device.",
    ),
    PrivateName("torch.utils._python_dispatch._disable_current_modes", "Runs code on real tensors during export."),
    PrivateName(
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "The user's dispatch modes: part of a cached trace's key.",
    ),
    PrivateName(
        "torch.utils._sympy.functions",
        "Functions of sizes (FloorDiv, Mod) in traced graphs, by name, for stored traces.",
    ),
    PrivateName("torch.utils._sympy.functions.Mod", "Remainders in conditions on sizes."),
    PrivateName("torch.utils._sympy.functions.PythonMod", "Remainders as Python's, which can be evaluated everywhere."),
    PrivateName("torch.utils._sympy.functions.ToFloat", "A size as a float, in expressions of traced graphs."),
    PrivateName("torch.utils._sympy.symbol.SymT", "Kinds of symbols in traced graphs."),
    PrivateName("torch.utils._sympy.symbol.symbol_is_type", "Distinguishes data-dependent sizes from others."),
    # State of torch that operators depend on: part of a cached trace's key.
    PrivateName("torch._C._get_cudnn_benchmark", "Value of torch.backends.cudnn.benchmark."),
    PrivateName("torch._C._get_cudnn_deterministic", "Value of torch.backends.cudnn.deterministic."),
    PrivateName("torch._C._get_cudnn_enabled", "Value of torch.backends.cudnn.enabled."),
    PrivateName(
        "torch._C._get_deterministic_fill_uninitialized_memory",
        "Value of torch.utils.deterministic.fill_uninitialized_memory.",
    ),
    PrivateName("torch._C._get_mkldnn_enabled", "Value of torch.backends.mkldnn.enabled."),
    PrivateName(
        "torch._C._get_sdp_priority_order",
        "The order that sdpa_kernel(.., set_priority=True) sets: part of the keys of measured times.",
    ),
    # Memory and versions of tensors.
    PrivateName(
        "torch.Tensor._make_wrapper_subclass",
        "Creates a subclass tensor with a shape but no memory, for outputs that other ranks hold.",
    ),
    PrivateName("torch.Tensor._version", "Counts in-place writes, to detect writes by the user."),
    PrivateName("torch.Tensor._indices", "The memory of a sparse tensor; indices() is for coalesced ones only."),
    PrivateName("torch.Tensor._values", "The memory of a sparse tensor; values() is for coalesced ones only."),
    PrivateName(
        "torch.UntypedStorage._cdata",
        "Identity of a storage, the same for all tensors that share it; data_ptr is 0 on the meta device.",
    ),
    PrivateName(
        "torch._C._storage_Use_Count", "Whether a message buffer is still referenced, before it is used again."
    ),
    PrivateName(
        "torch.distributed._composable.contract.REGISTRY_KEY",
        "Where FullyShardedDataParallel and fully_shard look before they wrap a module: a RaNNCModule refuses them.",
    ),
    PrivateName(
        "torch._compile._disable_dynamo",
        "torch.compile runs the decorated function as it is; the public name imports torch._dynamo, a second of time.",
    ),
    PrivateName(
        "torch._C._swap_tensor_impl",
        "Swaps the contents of a parameter; torch.utils.swap_tensors refuses tensors with weak references.",
    ),
    PrivateName(
        "torch._conj",
        "Recreates a conjugate view as the constructor made it, for any dtype of the storage.",
    ),
    PrivateName("torch._neg_view", "Recreates a negated view; there is no public equivalent."),
    # autograd.
    PrivateName(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        "Whether the running backward was called with retain_graph.",
    ),
    PrivateName(
        "torch._C._will_engine_execute_node",
        "Whether the running backward was called for a parameter (backward(inputs=...)).",
    ),
    PrivateName(
        "torch.autograd._engine_run_backward",
        "Patched, so that backward(inputs=...) and autograd.grad find parameters of wrapped models.",
    ),
    PrivateName(
        "torch.autograd.grad_mode._unsafe_preserve_version_counter",
        "A backward may follow a call with averages: parameters have their own values again, as if unchanged.",
    ),
    PrivateName("torch.Tensor._backward_hooks", "Hooks of register_hook, which are called with reduced gradients."),
    PrivateName(
        "torch.optim.Optimizer._optimizer_step_pre_hooks",
        "The order of hooks: with ZeRO those of the script have to run before rannd's, which put pieces of parameters.",
    ),
    PrivateName(
        "torch.optim.Optimizer._optimizer_step_post_hooks",
        "The order of hooks: with ZeRO those of the script have to run after rannd's, which put whole parameters back.",
    ),
    PrivateName(
        "torch.Tensor._post_accumulate_grad_hooks",
        "Hooks of register_post_accumulate_grad_hook, which are called after the reduction.",
    ),
    # Clipping and overflow: many tensors in one call.
    PrivateName(
        "torch.amp.GradScaler._get_scale_async",
        "The scale where it is, on the device: get_scale reads the device.",
    ),
    PrivateName("torch._foreach_add_", "Adds all gradients to those of the parameters at once, as optimizers do."),
    PrivateName("torch._foreach_div_", "Divides all pieces of gradients at once."),
    PrivateName("torch._foreach_copy_", "Copies all gradients into a bucket at once, as DistributedDataParallel does."),
    PrivateName("torch._foreach_mul_", "Scales all gradients at once, as torch's own clipping does."),
    PrivateName(
        "torch.ops.aten._amp_foreach_non_finite_check_and_unscale_", "What GradScaler does, told from other operators."
    ),
    PrivateName("torch.ops.aten._foreach_max", "Needs whole tensors, unlike other operators on lists."),
    PrivateName("torch.ops.aten._foreach_norm", "Needs whole tensors, unlike other operators on lists."),
    PrivateName("torch._foreach_norm", "Norms of all gradients at once."),
    PrivateName(
        "torch.nn.utils.clip_grad._get_total_norm",
        "The norm without torch's checks; also patched, because torch.nn.utils.clip_grad_norm_ calls it.",
    ),
    # Modules: these attributes are a module's complete state; public functions run hooks, or return less.
    PrivateName(
        "torch.nn.Module._apply", "Tracing need not inspect it; a wrapper that is converted calls its model's."
    ),
    PrivateName("torch.nn.Module._backward_hooks", "The user's backward hooks."),
    PrivateName("torch.nn.Module._backward_pre_hooks", "The user's backward pre-hooks."),
    PrivateName("torch.nn.Module._buffers", "A module's own buffers, to replace them."),
    PrivateName("torch.nn.Module._call_impl", "Attribute that torch reads in each call of a module."),
    PrivateName(
        "torch.nn.Module._compiled_call_impl",
        "Called in place of a module and its hooks; unlike other attributes not copied or pickled with it.",
    ),
    PrivateName("torch.nn.Module._forward_hooks", "The user's forward hooks."),
    PrivateName("torch.nn.Module._forward_hooks_always_called", "Which of them run even if forward raises."),
    PrivateName("torch.nn.Module._forward_hooks_with_kwargs", "Which of them take keyword arguments."),
    PrivateName("torch.nn.Module._forward_pre_hooks", "The user's forward pre-hooks."),
    PrivateName("torch.nn.Module._forward_pre_hooks_with_kwargs", "Which of them take keyword arguments."),
    PrivateName("torch.nn.Module._is_full_backward_hook", "Kind of the backward hooks."),
    PrivateName("torch.nn.Module._load_from_state_dict", "Whether a class overrides loading, and whether it runs."),
    PrivateName("torch.nn.Module._load_state_dict_post_hooks", "Whether the user's hooks run after loading."),
    PrivateName("torch.nn.Module._load_state_dict_pre_hooks", "Whether the user's hooks run before loading."),
    PrivateName("torch.nn.Module._modules", "A module's own submodules, including those that are None."),
    PrivateName("torch.nn.Module._non_persistent_buffers_set", "Which buffers a state_dict leaves out."),
    PrivateName("torch.nn.Module._parameters", "A module's own parameters, to replace them."),
    PrivateName("torch.nn.Module._save_to_state_dict", "A method that tracing need not inspect."),
    PrivateName("torch.nn.Module._state_dict_hooks", "Affects only saving: not part of a cached trace's key."),
    PrivateName("torch.nn.Module._state_dict_pre_hooks", "Affects only saving: not part of a cached trace's key."),
    PrivateName("torch.nn.Module._wrapped_call_impl", "Attribute that torch reads in each call of a module."),
    PrivateName(
        "torch.nn.Module.state_dict._metadata",
        "Versions of modules in a state_dict, read by load_state_dict; kept in copies.",
    ),
    PrivateName(
        "torch.nn.MultiheadAttention._reset_parameters", "Initialises it; in other modules this method is public."
    ),
    PrivateName("torch.nn.Transformer._reset_parameters", "Initialises it; in other modules this method is public."),
    PrivateName(
        "torch.nn.Module._get_name",
        "RaNNCModule returns the wrapped model's: transformers' Trainer knows by it how labels are to be smoothed.",
    ),
    PrivateName("torch.nn.RNNBase._flat_weight_refs", "Shows a recurrent layer that its parameters were replaced."),
    PrivateName(
        "torch.nn.RNNBase._flat_weights",
        "A recurrent layer's second list of its parameters, updated when they are replaced.",
    ),
    PrivateName(
        "torch.nn.modules.batchnorm._NormBase",
        "Base class of layers with running statistics: batch norms, instance norms, SyncBatchNorm.",
    ),
    PrivateName("torch.nn.modules.dropout._DropoutNd", "Base class of dropout layers."),
    PrivateName("torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX", "Name of a module's extra state in a state_dict."),
    PrivateName("torch.nn.modules.module._global_backward_hooks", "Global hooks: part of a cached trace's key."),
    PrivateName(
        "torch.nn.modules.module._global_backward_pre_hooks",
        "Global hooks: part of a cached trace's key.",
    ),
    PrivateName(
        "torch.nn.modules.module._global_buffer_registration_hooks",
        "Global hooks, some of which 2.11 and 2.12 do not remove after a failed export.",
    ),
    PrivateName("torch.nn.modules.module._global_forward_hooks", "Global hooks: part of a cached trace's key."),
    PrivateName(
        "torch.nn.modules.module._global_forward_hooks_always_called", "Which of them run even if forward raises."
    ),
    PrivateName("torch.nn.modules.module._global_forward_hooks_with_kwargs", "Which of them take keyword arguments."),
    PrivateName("torch.nn.modules.module._global_forward_pre_hooks", "Global hooks: part of a cached trace's key."),
    # Ranks and checkpoints.
    PrivateName(
        "torch.distributed.ProcessGroup._get_backend", "NCCL backend of a group, to abort it after a rank has failed."
    ),
    PrivateName(
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "Location of a tensor in torch's checkpoint files: a class in their index.",
    ),
    PrivateName(
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "A class in that index, which is read with an allow-list instead of plain unpickling.",
    ),
    PrivateName("torch._utils._rebuild_parameter", "A function in the pickles of torch.save, which are read as data."),
    PrivateName("torch._utils._rebuild_tensor_v2", "As _rebuild_parameter, for tensors."),
    PrivateName(
        "torch._utils._rebuild_tensor_v3", "As _rebuild_tensor_v2, for dtypes that have no storage class of their own."
    ),
    PrivateName("torch.serialization._get_layout", "A function in that index, on the allow-list for reading it."),
    # ATen operators with private names, which torch's public functions become in graphs.
    PrivateName("torch.ops.aten._adaptive_avg_pool2d", "adaptive_avg_pool2d and AdaptiveAvgPool2d."),
    PrivateName("torch.ops.aten._adaptive_avg_pool3d", "adaptive_avg_pool3d."),
    PrivateName("torch.ops.aten._assert_async", "A check that export adds; dropped."),
    PrivateName("torch.ops.aten._assert_scalar", "A check that export adds; dropped."),
    PrivateName(
        "torch.ops.aten._assert_tensor_metadata",
        "A check that export adds, with the tracing machine's device; dropped.",
    ),
    PrivateName("torch.ops.aten._ctc_loss", "ctc_loss, which lacks a suitable fake kernel; rannd registers one."),
    PrivateName("torch.ops.aten._fused_rms_norm", "rms_norm."),
    PrivateName("torch.ops.aten._grouped_mm", "Grouped matrix products, in mixtures of experts."),
    PrivateName("torch.ops.aten._log_softmax", "log_softmax."),
    PrivateName("torch.ops.aten._native_batch_norm_legit", "batch_norm, in decompositions."),
    PrivateName("torch.ops.aten._native_multi_head_attention", "MultiheadAttention's fast path in evaluation."),
    PrivateName("torch.ops.aten._reshape_alias", "reshape."),
    PrivateName("torch.ops.aten._safe_softmax", "softmax with rows that are masked as a whole, in attention."),
    PrivateName("torch.ops.aten._softmax", "softmax."),
    PrivateName("torch.ops.aten._standard_gamma", "Samples of Gamma distributions."),
    PrivateName("torch.ops.aten._to_copy", "Tensor.to."),
    PrivateName("torch.ops.aten._transformer_encoder_layer_fwd", "TransformerEncoderLayer's fast path in evaluation."),
    PrivateName(
        "torch.ops.aten._thnn_fused_gru_cell", "gru_cell on CUDA, which lacks a fake kernel; rannd registers one."
    ),
    PrivateName("torch.ops.aten._unsafe_index", "Indexing without a bounds check, in decompositions."),
    PrivateName("torch.ops.aten._unsafe_index_put", "index_put without a bounds check, in decompositions."),
    PrivateName("torch.ops.aten._unsafe_view", "reshape, inside matmul."),
    PrivateName("torch.ops.aten._unique2", "torch.unique."),
    PrivateName("torch.ops.aten._upsample_bicubic2d_aa", 'interpolate(mode="bicubic", antialias=True).'),
    PrivateName("torch.ops.aten._upsample_bilinear2d_aa", 'interpolate(mode="bilinear", antialias=True).'),
    PrivateName("torch.ops.aten._upsample_nearest_exact1d", 'interpolate(mode="nearest-exact").'),
    PrivateName("torch.ops.aten._upsample_nearest_exact2d", 'interpolate(mode="nearest-exact") of images.'),
    PrivateName("torch.ops.aten._upsample_nearest_exact3d", 'interpolate(mode="nearest-exact") of volumes.'),
    PrivateName("torch.ops.aten._weight_norm", "weight_norm."),
    # Compiled blocks: settings and facts of torch.compile that have no public names.
    PrivateName("torch._dynamo.OptimizedModule._orig_mod", "The module that torch.compile was given, to wrap it."),
    PrivateName("torch._dynamo.config", "disable, which switches torch.compile off."),
    PrivateName("torch._dynamo.config.disable", "Read before a block is compiled: torch 2.11 does not say so."),
    PrivateName("torch._dynamo.utils.counters", "Whether inductor compiled a block, or found it in its cache."),
    PrivateName(
        "torch._functorch.config",
        "donated_buffer, which is off for compiled blocks: with it a second backward (retain_graph) is refused.",
    ),
    PrivateName("torch._functorch.config.patch", "Changes it for a while."),
    PrivateName(
        "torch._inductor.async_compile.shutdown_compile_workers", "Ends the processes that compile Triton kernels."
    ),
    PrivateName(
        "torch._inductor.cpu_vec_isa.pick_vec_isa",
        "What torch finds out about the C++ compiler, once in a process: kept apart from the blocks.",
    ),
    PrivateName(
        "torch._inductor.runtime.cache_dir_utils.default_cache_dir",
        "Whether TORCHINDUCTOR_CACHE_DIR is the user's, or set by torch itself.",
    ),
    # Modules that benchmarks check for.
    PrivateName("torch._inductor", "Should not be imported at startup (checked by bench/startup.py)."),
    PrivateName("torch.export._trace", "Should not be imported by a start with a cached trace (bench/startup.py)."),
    # Loading: which batches a script has got.
    PrivateName(
        "torch.utils.data.dataloader._BaseDataLoaderIter",
        "Counts for an ElasticSampler which batches the script has got: workers fetch others in advance, and samplers "
        "are not told. torchdata's iterators are of this class, too.",
    ),
    PrivateName(
        "torch.utils.data.dataloader._BaseDataLoaderIter._sampler_iter",
        "Whether a DataLoader reads an ElasticSampler.",
    ),
    PrivateName(
        "torch.utils.data.dataloader._BaseDataLoaderIter._next_index",
        "Tells what a DataLoader reads of an ElasticSampler from what a script reads itself.",
    ),
)
"""All private names of torch that the project uses."""
