"""Which rank saves what several ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


def divide_writing(
    tensors: Mapping[str, torch.Tensor], slots: Mapping[str, tuple[int, ...]], rank_of_slot: Sequence[int]
) -> dict[str, int]:
    """Divide what several ranks hold alike among them, by bytes, largest first; the same on all ranks.

    Only trainable parameters are equal on all of them: of others, such as running means, the first rank's count.
    """
    found = {name: rank_of_slot[held[0]] for name, held in slots.items()}
    shared = [name for name, each in tensors.items() if isinstance(each, nn.Parameter) and each.requires_grad]
    load = dict.fromkeys(rank_of_slot, 0)
    size = {name: each.numel() * each.itemsize for name, each in tensors.items()}
    for name in size.keys() - set(shared):
        load[found[name]] += size[name]
    for name in sorted(shared, key=size.__getitem__, reverse=True):
        found[name] = min((rank_of_slot[slot] for slot in slots[name]), key=lambda rank: (load[rank], rank))
        load[found[name]] += size[name]
    return found
