"""Shapes of operators that torch can run but not trace: it has no kernel for fake tensors of them.

Importing this file tells torch.
"""

from __future__ import annotations

from typing import Any

import torch


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


for _name in ("aten::_ctc_loss", "aten::_ctc_loss.Tensor"):
    torch.library.register_fake(_name, _ctc_loss, allow_override=True)  # torch 2.11 refuses without it
