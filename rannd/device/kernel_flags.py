"""Settings of torch that decide which kernels a device runs, and so how long they take."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from rannd.device.identity import is_accelerator

Flag: TypeAlias = bool | int | str | None


def kernel_flags(device: torch.device) -> dict[str, Flag]:
    """This process's settings for a kind of device, by name.

    Precisions are read as `fp32_precision`, which also has what was set by ``allow_tf32`` and
    ``set_float32_matmul_precision``; reading those is an error in torch once both ways were used.
    """
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": torch._C._get_deterministic_fill_uninitialized_memory(),
        **(_of_cuda() if is_accelerator(device) else _of_the_cpu()),
    }


def matmul_precisions() -> list[str]:
    """Precision of products of float32 matrices on accelerators and on the CPU."""
    mkldnn: Any = torch.backends.mkldnn
    return [torch.backends.cuda.matmul.fp32_precision, mkldnn.matmul.fp32_precision]


def _of_the_cpu() -> dict[str, Flag]:
    mkldnn: Any = torch.backends.mkldnn
    return {
        "mkldnn": mkldnn.enabled,
        "mkldnn deterministic": mkldnn.deterministic,
        "fp32 matmul": mkldnn.matmul.fp32_precision,
        "fp32 conv": mkldnn.conv.fp32_precision,
        "fp32 rnn": mkldnn.rnn.fp32_precision,
    }


def _of_cuda() -> dict[str, Flag]:
    cuda: Any = torch.backends.cuda
    cudnn: Any = torch.backends.cudnn
    return {
        "fp32 matmul": cuda.matmul.fp32_precision,
        "fp32 conv": cudnn.conv.fp32_precision,
        "fp32 rnn": cudnn.rnn.fp32_precision,
        "fp16 reduction": cuda.matmul.allow_fp16_reduced_precision_reduction,
        "fp16 split k": cuda.matmul.allow_fp16_reduced_precision_reduction_split_k,
        "bf16 reduction": cuda.matmul.allow_bf16_reduced_precision_reduction,
        "bf16 split k": cuda.matmul.allow_bf16_reduced_precision_reduction_split_k,
        "fp16 accumulation": cuda.matmul.allow_fp16_accumulation,
        "sdp flash": cuda.flash_sdp_enabled(),
        "sdp efficient": cuda.mem_efficient_sdp_enabled(),
        "sdp cudnn": cuda.cudnn_sdp_enabled(),
        "sdp math": cuda.math_sdp_enabled(),
        "sdp math reduction": cuda.fp16_bf16_reduction_math_sdp_allowed(),
        "sdp order": str(torch._C._get_sdp_priority_order()),
        "flash": torch.nn.attention.current_flash_attention_impl(),
        "cudnn": cudnn.enabled,
        "cudnn benchmark": cudnn.benchmark,
        "cudnn deterministic": cudnn.deterministic,
        "cudnn depthwise": getattr(cudnn, "depthwise_kernel", None),  # since torch 2.13
        "blas": cuda.preferred_blas_library().name,
        "linalg": cuda.preferred_linalg_library().name,
    }
