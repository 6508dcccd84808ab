"""The functions that a cached trace may call: operators of torch or the program, and a few of Python's.

What is left to trust: that those of torch's operators that are allowed check their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch

from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.stored.grammar_rules import broken

_OPERATOR: Final = (
    "abs add and_ eq floordiv ge getitem gt iadd iand ifloordiv imod imul inv invert ior ipow is_ is_not isub itruediv "
    "ixor le lshift lt matmul mod mul ne neg not_ or_ pos pow rshift sub truediv truth xor"
)
_MATH: Final = "acos asin atan ceil cos cosh exp floor fabs isqrt log log10 log2 pow sin sinh sqrt tan tanh trunc"
_SYM: Final = "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum"
FUNCTIONS: Final[Mapping[str, frozenset[str]]] = {
    "_operator": frozenset(_OPERATOR.split()),
    "math": frozenset(_MATH.split()),
    "torch": frozenset(_SYM.split()),
}
"""Python functions that a graph may call, by module."""

_HIGHER_ORDER: Final = (
    "associative_scan cond flex_attention hints_wrapper map_impl scan strict_mode tag_activation_checkpoint while_loop "
    "wrap wrap_with_autocast wrap_with_set_grad_enabled"
)
HIGHER_ORDER: Final = frozenset(_HIGHER_ORDER.split())
"""Higher-order operators that a graph may call: they run its own subgraphs."""

_COMPUTING: Final = frozenset({"aten", "prims"})
"""Namespaces of torch's operators that compute tensors."""
_OTHERS: Final = (
    "_TorchScriptTesting _c10d_functional _c10d_functional_autograd _dtensor _inductor_debug _inductor_test "
    "_native _native_aot _quantized _test _torch_testing ao bucketing c10d c10d_functional coor cplib "
    "debug_mode_ops debugprims device_mesh export flex_gemm flex_lib fsdp inductor inductor_prims mempool mkl "
    "mkldnn mkldnn_prepacked onednn onnx onnx_symbolic pippy prepacked profiler quantization quantized "
    "quantized_decomposed rngprims semi_structured sparse static_runtime streams symm_mem testlib torch_attn "
    "torch_vendor_quack triton"
)
TORCHS_OTHERS: Final = frozenset(_OTHERS.split())
"""Torch's other namespaces: communication, files, and internal operators that trust their arguments."""

_WITH_RULES: Final = (
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _assert_tensor_metadata _fused_rms_norm _grouped_mm _log_softmax "
    "_native_multi_head_attention _softmax _to_copy _transformer_encoder_layer_fwd _unsafe_index _unsafe_index_put "
    "_unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d"
)
_WITHOUT_RULES: Final = (
    "__and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__ "
    "_safe_softmax _standard_gamma _unique2 _weight_norm"
)
INTERNAL: Final = frozenset((*_WITH_RULES.split(), *_WITHOUT_RULES.split()))
"""Those operators of `aten` and `prims` whose names begin with an underscore that a graph may call.

Torch's other internal operators trust what the public ones have checked: indices and sizes, for example.
"""
_REFUSED: Final = re.compile(r"from_file|save|.*backward.*|.*(sparse|mkldnn|cudnn|miopen).*")
"""Other operators of these that touch files, or trust what another one made: a forward, or tensors of a layout."""
_REFUSED_ARGUMENTS: Final = frozenset({"filename", "unsafe"})
_VALUES: Final = "Device Generator SymBool SymFloat SymInt Tensor bool complex float int number"
_VALUE_TYPES: Final = frozenset(_VALUES.split())
_CONTAINER_TYPES: Final = re.compile(r"Optional\[|List\[|\]")

_OPERATOR_NAME = re.compile(r"[A-Za-z_]\w{0,127}::[A-Za-z_]\w{0,255}", re.ASCII)
_OVERLOAD = re.compile(r"\w{1,128}", re.ASCII)


def check_function(target: Any, leaves: bool) -> None:
    """Check how a function is named; `leaves`: whether it may be a part of the user's model."""
    if not isinstance(target, list) or len(target) != 3 or any(type(each) is not str for each in target):
        broken("a function", target)
    kind, where, name = target
    if kind == "op":
        right = bool(_OPERATOR_NAME.fullmatch(where) and _OVERLOAD.fullmatch(name)) and (where != LEAF or leaves)
    elif kind == "hop":
        right = where in HIGHER_ORDER and not name
    else:
        right = kind == "py" and name in FUNCTIONS.get(where, ())
    if not right:
        broken("a function", target)


def check_operator(target: Any) -> None:
    """Check that an operator that was found by name may be called."""
    if not isinstance(target, torch._ops.OpOverload):
        broken("an operator", target)
    namespace, name = target._schema.name.split("::")
    arguments = target._schema.arguments
    if namespace in TORCHS_OTHERS:
        broken("an operator", target)
    if namespace in _COMPUTING:
        if (name.startswith("_") and name not in INTERNAL) or _REFUSED.fullmatch(name):
            broken("an operator", target)
        if not _REFUSED_ARGUMENTS.isdisjoint(argument.name for argument in arguments):
            broken("an operator", target)
        return
    given = [str(argument.type) for argument in arguments]
    if target._schema.name != LEAF and not all(_CONTAINER_TYPES.sub("", each) in _VALUE_TYPES for each in given):
        broken(f"an operator that takes ({', '.join(given)})", target)
