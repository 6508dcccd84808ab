"""Shapes of operators that torch can run but not trace: it has no kernel for fake tensors of them, or a wrong one.

Importing this file tells torch.
"""

from __future__ import annotations

from typing import Any

import torch

from rannd.torch_mends import mend_kernels, override_fake


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each sample, table for its backward); log_probs are (time, samples, classes) or (time, classes)."""
    shape = log_probs.shape[1:-1]
    table = (*shape, log_probs.shape[0], 2 * targets.shape[-1] + 1)
    return log_probs.new_empty(shape), log_probs.new_empty(table)


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(new state, table for its backward); hx is (samples, features). Of CUDA alone."""
    return torch.empty_like(hx, memory_format=torch.contiguous_format), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


override_fake("aten::_thnn_fused_gru_cell", _gru_cell)
for _name in ("aten::_ctc_loss", "aten::_ctc_loss.Tensor"):
    override_fake(_name, _ctc_loss)
mend_kernels()
