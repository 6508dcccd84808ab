"""Serialize tensors and modules to text: those of the model by name, others by their contents."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rannd.graph.fingerprint.bytecode import number
from rannd.graph.fingerprint.object_reader import Sort, attributes_of, form_of
from rannd.graph.fingerprint.state_rules import (
    HOOK_FLAGS,
    IGNORED,
    IGNORED_OF_TENSORS,
    KEY_BYTES,
    MODULE_PARTS,
    ModulePart,
)
from rannd.graph.fingerprint.value_writer import Hidden, ValueWriter

_APART = frozenset(name for name, part in MODULE_PARTS.items() if part is not ModulePart.VALUE)
"""Attributes of nn.Module that are not serialized like user attributes."""


class ModuleWriter(ValueWriter):
    """Serializes tensors and modules. `tensors` and `modules` map the ids of the model's own to their names."""

    def __init__(self, tensors: Mapping[int, str], modules: Mapping[int, str]) -> None:
        super().__init__()
        self._tensors = tensors
        self._modules = modules

    def write_tensor(self, tensor: torch.Tensor, scope: str, where: str) -> str:
        """Serialize a tensor of the model without its values."""
        self._scope, self._where, self._tolerant = scope, where, False
        return self._tensor_text(tensor)

    def write_module(self, module: nn.Module, name: str) -> str:
        """Serialize class, attributes and hooks of a module of the model; not parameters, buffers and submodules."""
        self._tolerant = False
        return self._module_text(module, name)

    def _tensor_text(self, tensor: torch.Tensor) -> str:
        """Serialize the metadata of a tensor: class, dtype, shape, device type, flags, strides and attributes."""
        kind = type(tensor)
        if form_of(kind).sort is not Sort.TENSOR:
            return self._opaque(kind, "is a tensor of another class")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return self._opaque(kind, f"of layout {tensor.layout} is not supported")
        dense = tensor.is_contiguous()
        layout = "" if dense else f"{tensor.stride()}"
        flags = f"{tensor.requires_grad:d}{tensor.is_leaf:d}{tensor.is_conj():d}{tensor.is_neg():d}"
        own = attributes_of(tensor).items()
        extra = "".join(f" {n!r}={self._value(item)}" for n, item in own if not n.startswith(IGNORED_OF_TENSORS))
        return f"{kind.__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.device.type} {flags} {layout}{extra}"

    def _tensor(self, tensor: torch.Tensor) -> str:
        """Serialize a tensor found in an attribute or global: by name if it is the model's, else with its values."""
        name = self._tensors.get(id(tensor))
        if name is not None:
            return f"tensor {name!r}"
        known = self._seen.get((id(tensor), self._tolerant))
        if known is not None:
            return "=" + known
        self._remember(tensor)
        text = self._tensor_text(tensor)
        if tensor.device.type == "meta" or text.startswith("?"):
            return text
        size = tensor.numel() * tensor.element_size()
        if size and not tensor.untyped_storage().nbytes():
            return f"{text} without memory"  # that replicas divide (ZeRO 3), while no segment reads it
        if self._bytes + size > KEY_BYTES:
            raise Hidden(
                f"{self._where}: a tensor of {size} bytes that is neither parameter nor buffer is too large to read "
                f"(at most {KEY_BYTES >> 20} MiB in all); register it as a buffer"
            )
        values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{text} {self._raw(values.numpy().tobytes())}"

    def _module(self, module: nn.Module) -> str:
        """Serialize a module found in an attribute or global: by name if it is the model's, else as a whole."""
        name = self._modules.get(id(module))
        if name is not None:
            return f"module {name!r}"
        self._remember(module)
        state = attributes_of(module)
        text = self._module_text(module)
        tensors = [self._value(dict(state.get(key, ()))) for key in ("_parameters", "_buffers", "_modules")]
        return f"<{text} {' '.join(tensors)}>"

    def _module_text(self, module: nn.Module, name: str | None = None) -> str:
        """Serialize class, attributes and hooks of a module, without its parameters, buffers and submodules."""
        kind = type(module)
        form = form_of(kind)
        if form.hidden:
            return self._opaque(kind, form.hidden)
        parts = [self._class(kind)]
        state = attributes_of(module)
        place = self._where if name is None else f"module {name}" if name else "the model"
        ignored = IGNORED.get((kind.__module__, kind.__qualname__), ())
        for key, item in state.items():
            if key in _APART or key in ignored:
                continue
            simple = type(item)
            if simple is bool or simple is int or simple is str or item is None:
                parts.append(f"{key!r}={item!r}")
            elif simple is float:
                parts.append(f"{key!r}={number(item)}")
            elif name is None:
                parts.append(f"{key!r}={self._value(item)}")
            else:
                self._scope, self._where = f"{name}.{key}", f"attribute {key} of {place}"
                parts.append(f"{key!r}={self._value(item)}")
        if name is not None:
            self._scope, self._where = f"{name}.hooks", f"the hooks of {place}"
        for slot_name, slot in form.slots:
            try:
                parts.append(f"{slot_name}={self._value(slot.__get__(module))}")
            except AttributeError:  # the slot is empty
                continue
        for hooks, flags in HOOK_FLAGS.items():
            flagged = [state.get(flag) or () for flag in flags]
            for key, hook in (state.get(hooks) or {}).items():
                flags_here = "".join(f"{key in each:d}" for each in flagged)
                parts.append(f"{hooks} {flags_here} {self._value(hook)}")
        for key, child in state.get("_modules", {}).items():
            if child is None:
                parts.append(f"no module {key!r}")
        if state.get("_non_persistent_buffers_set"):
            parts.append(f"not persistent {sorted(state['_non_persistent_buffers_set'])}")
        return " ".join(parts)
