"""Values that travel together: one message for a piece and an edge, however many they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Node

from rannd.errors import StepError
from rannd.graph.cut import crossing_shape

ALIGNMENT = 64
"""Bytes: a value begins at a multiple of this."""


class Parcel:
    """Layout of a message that carries the values of some nodes for a piece of `rows` rows.

    One value travels as it is; several are copied one behind the other into a message of bytes.
    """

    def __init__(self, nodes: Sequence[Node], rows: int) -> None:
        self.rows = rows
        self.nodes = tuple(nodes)
        self._shapes = [crossing_shape(node, rows) for node in nodes]
        self._types: list[torch.dtype] = [node.meta["val"].dtype for node in nodes]
        self._sizes = [
            math.prod(shape) * dtype.itemsize for shape, dtype in zip(self._shapes, self._types, strict=True)
        ]
        self._starts: list[int] = []
        end = 0
        for size in self._sizes:
            self._starts.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.bytes = end if sum(map(bool, self._sizes)) > 1 else sum(self._sizes)
        """Bytes of the message; none is sent where there are none."""

    def pack(self, values: Mapping[Node, torch.Tensor]) -> torch.Tensor | None:
        """The message; None where there is nothing to send. StepError for a value that is not as it was traced."""
        message: torch.Tensor | None = None
        alone = sum(map(bool, self._sizes)) == 1
        for node, shape, dtype, size, start in zip(
            self.nodes, self._shapes, self._types, self._sizes, self._starts, strict=True
        ):
            value = values[node]
            if value.dtype != dtype or tuple(value.shape) != shape:
                raise StepError(
                    f"value {node.name} is {value.dtype} {tuple(value.shape)}, but was traced as {dtype} {shape} for "
                    f"{self.rows} rows; the model gives other shapes than when it was traced, or runs under another "
                    "autocast or default dtype"
                )
            if size and alone:
                return value.detach().contiguous()
            if size:
                if message is None:
                    message = torch.empty(self.bytes, dtype=torch.uint8, device=value.device)
                message[start : start + size].view(dtype).view(shape).copy_(value.detach())
        return message

    def unpack(self, message: torch.Tensor | None, device: torch.device) -> dict[Node, torch.Tensor]:
        """The values in a message of bytes, which share its memory."""
        values: dict[Node, torch.Tensor] = {}
        for node, shape, dtype, size, start in zip(
            self.nodes, self._shapes, self._types, self._sizes, self._starts, strict=True
        ):
            if size:
                assert message is not None
                start = 0 if self.bytes == size else start
                values[node] = message[start : start + size].view(dtype).view(shape)
            else:
                values[node] = torch.empty(shape, dtype=dtype, device=device)
        return values
